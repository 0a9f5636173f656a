"""What is measured for the reports: of every modality its sections, each some words and the commands behind its tables.

Knows the words of command lines; runs nothing, imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FREE = (
    "jacobi,prompt-lookup,input-guided,rest,anpd,n-grammys,lookahead,suffix,token-recycling,sparse-cache,ensemble,"
    "draft-model,specinfer,specexec,sequoia,cs-drafting,specdec-plus-plus,bild,on-the-fly-window,adaptive,guarded,"
    "auto"
)
_SHORTER = "draft-verify,swift,draft-on-the-fly"
_OPTIONS = "--drafter-option rest.store={store} --drafter-option specexec.nodes=64"
_TRAINED = "draft-model,medusa,hydra,eagle3,dspark,kangaroo,suffix,ensemble,auto"
_TREES = (
    "--drafter-option medusa.nodes=16 --drafter-option hydra.nodes=16 --drafter-option eagle3.nodes=15 "
    """--drafter-option 'ensemble.drafters=["suffix", "eagle3"]' --drafter-option ensemble.least=0 """
    """--drafter-option 'auto.drafters=["suffix", "eagle3"]'"""
)
_MORE = (
    "sampled-tree,top-k-tree,dynamic-tree,triforce,qspec,predrafted,pearl,medusa,hydra,eagle3,eagle,eagle2,blockwise,"
    "amphista,dflash,dspark,specdec,falcon,pass,layer-skip,kangaroo,mtp,ctc"
)
_CODES = (
    "jacobi,prompt-lookup,anpd,lookahead,suffix,token-recycling,ensemble,adaptive,guarded,draft-model,sampled-tree,"
    "top-k-tree,dynamic-tree,specinfer,specexec,predrafted,pearl,cs-drafting,sequoia,bild,on-the-fly-window"
)
_DRAWN = "--prompts held-out --dtype bfloat16 --batch 1 --drafter-option jacobi.window=16,32"
_RELAXED = "tolerance,top-k-membership,additive-beta,typical,lantern,annealed"
_BUILD = "datastore build {python}/pydoc_data -o {store}"
CURVES = "curves -o {folder}/curves.png"
METHODS = "methods"  # the section of every modality that the report of all is made of


@dataclass(frozen=True)
class Section:
    """Commands are what follows `outrider bench`; {prompts} is the file somebody gave, without which the section is
    left out, {store} a datastore in the page's {folder}, and {python} where Python's own library is."""

    name: str
    title: str
    about: str
    commands: tuple[str, ...]
    before: str = ""  # a command of outrider's that has to run first
    needs: tuple[str, ...] = ()  # recipes whose weights have to be there
    quick: bool = False  # measured too when everything is, in a hurry
    main: bool = False  # on the page of all modalities too
    pictures: tuple[str, ...] = ()  # that its commands draw into the folder
    pays: bool = False  # with a table of where each drafter starts to pay

    def files(self, folder: Path) -> list[Path]:
        if len(self.commands) == 1:
            return [folder / f"{self.name}.json"]
        return [folder / f"{self.name}-{number}.json" for number in range(1, len(self.commands) + 1)]


def _both(command: str) -> tuple[str, str]:
    return f"{command} --temperature 0", f"{command} --temperature 1"


TEXT = (
    Section(
        METHODS,
        "Every method, at temperature 0 and 1",
        "Every drafter there are weights for, under the rule that changes nothing. `rest` looks things up in the "
        "language reference that Python brings along.",
        _both(
            f"text --drafters {_FREE},{_SHORTER},{_MORE} {_OPTIONS} --max-new-tokens 64 --limit 14 "
            "--calibrate sequoia,draft-verify"
        ),
        _BUILD,
        quick=True,
    ),
    Section(
        "precision",
        "Fewer bits",
        "Perplexity and the likeliest token's agreement with 32 bits on the prompts' own text, beside the speed of "
        "plain decoding.",
        ("precision --limit 14",),
    ),
    Section(
        "batch",
        "A batch of eight",
        "Eight prompts of different lengths decoded side by side and one after another, in turns.",
        ("batch",),
    ),
    Section(
        "peers-bfloat16",
        "Beside other engines, 16 bits",
        "Greedy, the same prompts in the same run. OpenVINO GenAI reads the same GGUF in 4 bits.",
        ("text --drafters prompt-lookup,ensemble,auto --max-new-tokens 96 --limit 7 --peers",),
        main=True,
    ),
    Section(
        "peers-int4",
        "Beside other engines, 4 bits",
        "As above, ours in 4 bits.",
        (
            "text --dtype int4 --drafters prompt-lookup,ensemble,eagle3,auto --drafter-option eagle3.nodes=15 "
            "--max-new-tokens 96 --limit 7 --peers",
        ),
        main=True,
    ),
    Section(
        "greedy",
        "Without training, greedy",
        "Every drafter that needs no training, and those that take the small draft model that ships. The datastore of "
        "`rest` is the language reference that Python brings along. Sequoia's shape was found on the same prompts "
        "beforehand. Those that leave out layers are below.",
        (f"text --drafters {_FREE} {_OPTIONS} --max-new-tokens 96 --limit 48 --calibrate sequoia",),
        _BUILD,
    ),
    Section(
        "sampled",
        "Without training, temperature 0.7",
        "The same, drawn; all of these keep the distribution of the output.",
        (f"text --drafters {_FREE} {_OPTIONS} --max-new-tokens 96 --limit 48 --temperature 0.7 --calibrate sequoia",),
        _BUILD,
    ),
    Section(
        "shorter",
        "With layers left out, greedy and at temperature 0.7",
        "The model drafts for itself with some of its layers left out; which, draft-verify found on the same prompts "
        "before the first command ran.",
        (
            f"text --drafters {_SHORTER} --max-new-tokens 96 --limit 48 --calibrate draft-verify",
            f"text --drafters {_SHORTER} --max-new-tokens 96 --limit 48 --temperature 0.7",
        ),
        pays=True,
    ),
    Section(
        "rules",
        "Relaxed rules for text, temperature 0.7",
        "These change the output's distribution; what they cost is in each trace (`relaxed price`).",
        tuple(
            f"text --drafters {drafter} --rule {rule} --max-new-tokens 96 --limit 48 --temperature 0.7"
            for drafter, rule in (("draft-model", "top-beta"), ("bild", "bild"), ("draft-model", "verify-every"))
        ),
        quick=True,
        main=True,
    ),
    Section(
        "editing",
        "Editing",
        "Rewriting with small changes and correcting, where the output repeats the input.",
        ("text --tasks editing --drafters input-guided,prompt-lookup,suffix,ensemble --max-new-tokens 96",),
    ),
    Section(
        "given",
        "All tasks of a given set",
        "The best of those without training on a set of prompts, every task in turn, and the guard.",
        ("text --prompts {prompts} --limit 52 --drafters ensemble,suffix,auto,guarded --max-new-tokens 96",),
    ),
    Section(
        "trained",
        "Trained drafters",
        "Those whose weights ship, beside the best without training and both together: all of their guesses, and as "
        "many as should be the fastest (auto); every task in turn; and how often their guesses are right, by place in "
        "the draft, on answers that were held out of training.",
        _both(f"text --prompts {{prompts}} --limit 52 --drafters {_TRAINED} {_TREES} --max-new-tokens 96"),
        CURVES,
    ),
    Section(
        "crowd",
        "Batches of 1 to 32",
        "Requests that enter and leave a batch, twice as many as it has rows, plainly and with drafting.",
        (
            "crowd --max-new-tokens 32 --repeat 2",
            "crowd --dtype int4 --rows 1,8,32 --max-new-tokens 32 --repeat 2",
        ),
    ),
    Section(
        "quantised",
        "Drafting in fewer bits",
        "Plain decoding and drafters in 16, 8 and 4 bits; qspec drafts with the same weights in 4 bits.",
        (
            "text --drafters prompt-lookup,qspec,auto --max-new-tokens 64 --limit 7",
            "text --dtype int8 --drafters prompt-lookup,qspec,auto --max-new-tokens 64 --limit 7",
            "text --dtype int4 --drafters prompt-lookup,auto --max-new-tokens 64 --limit 7",
        ),
    ),
    Section(
        "offload",
        "Layers read from the disk",
        "So much of the layers stays in memory, and the rest is read in every pass; drafters stay.",
        ("offload --limit 2 --max-new-tokens 32 --repeat 2",),
    ),
    Section(
        "long",
        "Prompts of 6,000 and 8,000 tokens",
        "The source of Python's argparse before a question, over a cache of 16 and one of 8 bits; speeds are those "
        "behind the prompt. sparse-cache and triforce draft with a copy of part of the cache. 'As exact' is how much "
        "was decoded before it differs from plain decoding over the cache of 16 bits.",
        ("long --repeat 2",),
    ),
    Section(
        "larger",
        "A larger target",
        "Qwen2.5-Coder-1.5B-Instruct, for which leaving out layers, and SmolLM2-135M with its other vocabulary, cost "
        "a smaller share of a pass.",
        tuple(
            f"text --model qwen2.5-coder-1.5b --dtype {dtype} --draft-model smollm2-135m --calibrate draft-verify "
            f"--drafters {drafters} --max-new-tokens 64 --limit 7"
            for dtype, drafters in (
                ("int8", "cross-vocabulary,draft-verify,swift,draft-on-the-fly,ensemble"),
                ("bfloat16", "cross-vocabulary,specexec,draft-verify,auto --drafter-option specexec.nodes=8"),
            )
        ),
        pays=True,
    ),
)

_PAINTER = ("image-tokenizer", "image-tokens")
_LATE = "--rule-option annealed.weight=2,4 --rule-option annealed.nu=0.1,0.7"
_JUDGED = "--prompts held-out --dtype bfloat16 --drafter-option jacobi.window=32 --judge"

IMAGE = (
    Section(
        METHODS,
        "Every method, at temperature 0 and 1",
        "Every drafter there are weights for, under the rule that changes nothing and the guidance that looks best, on "
        "the same held-out names and seeds, a picture at a time.",
        _both(f"image --drafters {_CODES},medusa,spatial,eagle,eagle2 --pictures 32 {_DRAWN}"),
        needs=_PAINTER,
        quick=True,
    ),
    Section(
        "relaxed",
        "Relaxed rules, temperature 1",
        "Calls spared against what each rule takes from the distribution: the price is the total variation of a code "
        "on average; nats a code are what the target itself thinks of the pictures.",
        (
            f"image --drafters jacobi --rules exact,{_RELAXED},lantern-plus-plus,grouped {_LATE} {_DRAWN} "
            "--plot {folder}/relaxed.png",
        ),
        needs=_PAINTER,
        quick=True,
        pictures=("relaxed.png",),
        main=True,
    ),
    Section(
        "quality",
        "Speed and quality, judged",
        "Four settings each of five rules, 256 pictures a row: KID to real pictures, LPIPS to plain decoding's, and "
        "how often the classifier sees what was asked for. Plain decoding with other seeds stands beside: what "
        "differs less than that is no difference.",
        (
            "image --drafters jacobi --rules exact,lantern,lantern-plus-plus,annealed,grouped,tolerance --rule-option "
            "lantern.delta=0.02,0.05,0.1,0.2 --rule-option lantern-plus-plus.ratio=0.5,1,2,4 --rule-option "
            "annealed.weight=1.5,2,4,8 --rule-option grouped.span=2,4,7,12 --rule-option tolerance.tau=2,3,5,8 "
            f"{_JUDGED} --pictures 256 --plot {{folder}}/quality.png",
        ),
        needs=(*_PAINTER, "image-classifier"),
        pictures=("quality.png",),
        main=True,
    ),
    Section(
        "judged",
        "The best relaxed settings, on 2,000 pictures",
        "Beside plain decoding of the same seeds and of others: KID within their spread, and prompts as well met.",
        (
            "image --drafters jacobi --rules annealed,grouped,tolerance --rule-option annealed.weight=4 --rule-option "
            f"annealed.nu=0.1 {_JUDGED} --pictures 2000",
        ),
        needs=(*_PAINTER, "image-classifier"),
        main=True,
    ),
)

_SPOKEN = (
    "medusa,hydra,eagle3,jacobi,prompt-lookup,input-guided,anpd,lookahead,suffix,token-recycling,sparse-cache,"
    "triforce,qspec,ensemble,adaptive,guarded,swift,draft-on-the-fly,draft-model,sampled-tree,top-k-tree,dynamic-tree,"
    "specinfer,specexec,predrafted,pearl,cs-drafting,sequoia,bild,on-the-fly-window"
)
_VOICE = ("speech-codec", "speech-voice")
_BENT = f"{_RELAXED},coarse-groups,threshold,lenience,trust,verify-every,top-beta,lantern-plus-plus,grouped,bild"
_SAID = "--temperature 0.6 --dtype bfloat16"
_HEARD, _HEADS = "--drafters jacobi,medusa", (*_VOICE, "speech-medusa")

SPEECH = (
    Section(
        METHODS,
        "Every method, at temperature 0 and 1",
        "Every drafter there are weights for, under the rule that changes nothing, on held-out sentences of all kinds; "
        "times are the language model's. Nats/tok say how open the voice's own distributions are; work is what model, "
        "codec and vocoder take, in seconds for a second of sound.",
        _both(f"speech --drafters {_SPOKEN} --limit 14 --dtype bfloat16"),
        needs=_VOICE,
        quick=True,
    ),
    Section(
        "speed",
        "The fastest, by the clock",
        "Those that spare the most calls, under the rule that changes nothing and under tolerance as it begins.",
        (f"speech --drafters jacobi,medusa,hydra,draft-model --rules exact,tolerance --limit 30 --repeat 2 {_SAID}",),
        needs=_VOICE,
        main=True,
    ),
    Section(
        "relaxed",
        "Relaxed rules, judged",
        "What is heard of each rule beside plain decoding, the teacher and what the codec leaves of it; intervals are "
        "bootstraps over sentences.",
        (
            f"speech --drafters jacobi --rules exact,{_BENT} --limit 40 {_SAID} --judge --rated 20 "
            "--plot {folder}/relaxed.png",
        ),
        needs=_HEADS,
        pictures=("relaxed.png",),
        main=True,
    ),
    Section(
        "curve",
        "Tolerance from strict to lax",
        "Tokens of a call against words wrong, as more draws from the target's distribution let a guess pass.",
        (
            f"speech {_HEARD} --rules tolerance --rule-option tolerance.tau=3,8,30,100 --limit 60 {_SAID} "
            "--judge --rated 30 --plot {folder}/curve.png",
        ),
        needs=_HEADS,
        pictures=("curve.png",),
    ),
    Section(
        "judged",
        "What ships, judged",
        "Tolerance as it begins beside plain decoding, the teacher and what the codec leaves of it; and a sentence of "
        "every kind, to be listened to.",
        (f"speech {_HEARD} --rules tolerance --limit 500 {_SAID} --judge --rated 150 --samples {{folder}}/samples",),
        needs=_HEADS,
        quick=True,
        main=True,
    ),
    Section(
        "human",
        "A human whom the codec never heard",
        "The codec learned from one synthetic voice: what it leaves of another, and what the vocoder alone does. These "
        "are prompts of a telephone exchange (Allison Smith, CC-BY-SA-3.0), their words as the recogniser hears them.",
        ("codec --limit 100",),
        needs=_VOICE,
    ),
)

SECTIONS: Mapping[str, tuple[Section, ...]] = {"text": TEXT, "image": IMAGE, "speech": SPEECH}

# Whose rows no report has, and why.
NOT_MEASURED: Mapping[str, Mapping[str, str]] = {
    "text": {},
    "image": {},
    "speech": {
        "rest": "there is no datastore of speech",
        "n-grammys": "nobody has counted pairs of speech tokens",
        "cross-vocabulary": "there is no smaller voice with other tokens",
    },
}
