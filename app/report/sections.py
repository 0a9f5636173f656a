"""The sections of `outrider report` for each modality: title, description and the benchmark commands behind the tables.

Contains command lines as text; runs nothing and imports nothing heavy.

Over 400 lines, being one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FREE = (
    "jacobi,prompt-lookup,input-guided,rest,anpd,n-grammys,lookahead,suffix,sam-decoding,token-recycling,sparse-cache,"
    "ensemble,draft-model,specinfer,specexec,sequoia,cs-drafting,specdec-plus-plus,bild,on-the-fly-window,adaptive,"
    "guarded,auto"
)
_SHORTER = "draft-verify,swift,draft-on-the-fly"
_OPTIONS = "--drafter-option rest.store={store} --drafter-option specexec.nodes=64"
_TRAINED = "draft-model,medusa,hydra,eagle3,dspark,kangaroo,suffix,ensemble,auto"
_TREES = (
    "--drafter-option medusa.nodes=16 --drafter-option hydra.nodes=16 --drafter-option eagle3.nodes=15 "
    """--drafter-option 'ensemble.drafters=["suffix", "eagle3"]' --drafter-option ensemble.min_probability=0 """
    """--drafter-option 'auto.drafters=["suffix", "eagle3"]'"""
)
_MORE = (
    "sampled-tree,top-k-tree,dynamic-tree,triforce,qspec,predrafted,pearl,medusa,hydra,eagle3,eagle,eagle2,blockwise,"
    "amphista,dflash,dflash2,dfly,domino,p-eagle,dspark,specdec,falcon,pass,layer-skip,kangaroo,mtp,ctc,llasa-plus"
)
_CODES = (
    "jacobi,prompt-lookup,anpd,lookahead,suffix,token-recycling,ensemble,adaptive,guarded,draft-model,sampled-tree,"
    "top-k-tree,dynamic-tree,specinfer,specexec,predrafted,pearl,cs-drafting,sequoia,bild,on-the-fly-window"
)
_DRAWN = "--prompts held-out --dtype bfloat16 --batch-size 1 --drafter-option jacobi.window=16,32"
_RELAXED = "tolerance,top-k-membership,additive-beta,typical,lantern,annealed"
_RULES = (
    "exact,token,block,sample-match,gumbel-match,threshold,lenience,tolerance,additive-beta,top-k-membership,typical,"
    "trust,verify-every,top-beta,annealed,bild"
)
_BUILD = "datastore build {python}/pydoc_data -o {store}"
BENCH = "bench"
CURVES = "plot-acceptance -o {folder}/curves.png"
METHODS = "methods"  # the section that every modality has; the summary report compares these


@dataclass(frozen=True)
class Section:
    """One section of a report. `commands` are the arguments of `outrider bench`, or of another command (`verb`).
    Placeholders: {prompts}, the file given by --prompts (the section is skipped without it); {folder}, the report's
    folder; {store}, a datastore in that folder; {python}, the folder of Python's standard library; {device}, the device
    given by --device."""

    name: str
    title: str
    about: str
    commands: tuple[str, ...]
    before: str = ""  # arguments of an `outrider` command that has to run first
    needs: tuple[str, ...] = ()  # recipes whose weights must exist
    quick: bool = False  # included in `outrider report all --quick`
    main: bool = False  # also shown in the summary report
    pictures: tuple[str, ...] = ()  # files that the commands draw into the folder
    verb: str = BENCH
    pays: bool = False  # add a table of each drafter's break-even cost

    def files(self, folder: Path) -> list[Path]:
        if len(self.commands) == 1:
            return [folder / f"{self.name}.json"]
        return [folder / f"{self.name}-{number}.json" for number in range(1, len(self.commands) + 1)]


def _both(command: str) -> tuple[str, str]:
    return f"{command} --temperature 0", f"{command} --temperature 1"


def _paired(prompts: str, others: str) -> tuple[str, str]:
    """The published pair on these prompts: in 4 bits beside llama.cpp; in 16 beside other drafters."""
    given = f"text --model qwen2.5-coder-1.5b {prompts}"
    return (
        f"{given} --drafters auto --max-new-tokens 96 --dtype int4 --peers llama.cpp",
        f"{given} --drafters auto,{others} --max-new-tokens 64 --dtype bfloat16",
    )


TEXT = (
    Section(
        METHODS,
        "Every method, at temperature 0 and 1",
        "Every drafter whose weights are installed, with the exact rule. The datastore of `rest` is Python's language "
        "reference. The tree shape of `sequoia` and the layers of `draft-verify` are chosen on prompts that are not "
        "scored (in measurements of before 27 November 2026, on the scored ones).",
        _both(
            f"text --drafters {_FREE},{_SHORTER},{_MORE} {_OPTIONS} --max-new-tokens 64 --num-prompts 21 "
            "--calibrate sequoia,draft-verify"
        ),
        _BUILD,
        quick=True,
        pays=True,
    ),
    Section(
        "precision",
        "Lower precision",
        "Perplexity and greedy agreement with float32 on the text of the prompts, and the speed of plain decoding.",
        ("precision --num-prompts 14",),
    ),
    Section(
        "batch",
        "A batch of eight",
        "Eight prompts of different lengths, decoded as one batch and one at a time, in turns.",
        ("batch",),
    ),
    Section(
        "engines-bfloat16",
        "Compared with other engines, 16 bits",
        "Greedy decoding of the same prompts in the same run. OpenVINO GenAI reads the same GGUF file in 4 bits.",
        ("text --drafters prompt-lookup,ensemble,auto --max-new-tokens 96 --num-prompts 14 --compare-engines",),
        main=True,
    ),
    Section(
        "engines-int4",
        "Compared with other engines, 4 bits",
        "As above, with Outrider in 4 bits.",
        (
            "text --dtype int4 --drafters prompt-lookup,ensemble,eagle3,auto --drafter-option eagle3.nodes=15 "
            "--max-new-tokens 96 --num-prompts 14 --compare-engines",
        ),
        main=True,
    ),
    Section(
        "rules",
        "Rules for text, temperature 0 and 0.7",
        "Chains of a draft model under every rule, then `bild`'s drafter, which goes back to the target where it is "
        "less sure than `threshold`, under its rule and the exact one. Relaxed rules have a price: the total variation "
        "(TV) between their distribution and the target's, and the target's negative log-likelihood (NLL) of the "
        "output.",
        tuple(
            f"text --drafters {drafter} --rules {rules} --max-new-tokens 64 --num-prompts 21 --temperature {heat}"
            for heat in (0, 0.7)
            for drafter, rules in (
                ("draft-model", _RULES),
                ("bild", "exact,bild --drafter-option bild.threshold=0.2,0.5,0.8"),
            )
        ),
        quick=True,
        main=True,
    ),
    Section(
        "editing",
        "Editing",
        "Rewriting and correcting text, where the output repeats most of the input.",
        ("text --tasks editing --drafters input-guided,prompt-lookup,suffix,ensemble --max-new-tokens 96",),
    ),
    Section(
        "structured",
        "Extraction as JSON",
        "Facts of short texts as JSON documents, each of which has to obey its schema; then the same prompts answered "
        "freely.",
        tuple(
            f"text --prompts records {obeying}--drafters auto,suffix,prompt-lookup --max-new-tokens 160 --repeat 2"
            for obeying in ("--obey-schemas ", "")
        ),
    ),
    Section(
        "given",
        "All tasks of a prompt file",
        "The best drafters without training, and `guarded`, on a given prompt file, with tasks taken in turn.",
        ("text --prompts {prompts} --num-prompts 52 --drafters ensemble,suffix,auto,guarded --max-new-tokens 96",),
    ),
    Section(
        "trained",
        "Trained drafters",
        "Drafters whose weights are bundled, the best one without training, and combinations of the two: `ensemble` "
        "proposes all tokens of both, `auto` as many as it predicts to be fastest. Tasks are taken in turn. The curves "
        "show how often a draft token is right, by position, on answers held out of training.",
        _both(f"text --prompts {{prompts}} --num-prompts 52 --drafters {_TRAINED} {_TREES} --max-new-tokens 96"),
        CURVES,
    ),
    Section(
        "ladder",
        "Trained on equal terms",
        "Ten draft heads trained for the same target on the same answers, which it has read before, for the same time "
        "(of the processor's work), with the same loss and rate and about the same number of parameters, ending early "
        "when drafts get no longer.",
        (
            "--minutes 3 --validations 8 --draft-vocab-size 8192 --output-dir {folder}/ladder "
            "--plot {folder}/ladder.png --quiet",
        ),
        pictures=("ladder.png",),
        verb="ladder",
    ),
    Section(
        "throughput",
        "Batches of 1 to 32",
        "Continuous batching with twice as many requests as rows, with and without drafting.",
        (
            "throughput --max-new-tokens 32 --repeat 2",
            "throughput --dtype int4 --batch-sizes 1,8,32 --max-new-tokens 32 --repeat 2",
        ),
    ),
    Section(
        "quantised",
        "Drafting in lower precision",
        "Plain decoding and drafters in 16, 8 and 4 bits; `qspec` drafts with the same weights in 4 bits. The draft "
        "heads were trained for the target in 16 bits.",
        tuple(
            f"text --dtype {dtype} --drafters {more}prompt-lookup,draft-model,medusa,eagle3,dspark,auto "
            "--max-new-tokens 64 --num-prompts 14"
            for dtype, more in (("bfloat16", "qspec,"), ("int8", "qspec,"), ("int4", ""))
        ),
    ),
    Section(
        "offload",
        "Layers read from the disk",
        "A fraction of the layers (`budget`) stays in memory; the others are read from disk in every pass. Drafters "
        "stay in memory.",
        ("offload --num-prompts 2 --max-new-tokens 32 --repeat 2",),
    ),
    Section(
        "long-context",
        "Prompts of 6,000 and 8,000 tokens",
        "The source of Python's argparse followed by a question, with a KV cache of 16 and of 8 bits. Speeds exclude "
        "prefill. `sparse-cache` and `triforce` draft with a copy of part of the cache. 'Same as full-precision "
        "cache' is the share of the output before it first differs from plain decoding with the 16-bit cache.",
        ("long-context --repeat 2",),
    ),
    Section(
        "by-context",
        "Prompts behind 128 to 7,800 tokens",
        "As above, for drafters that were trained on short texts and those that copy, behind longer and longer ones.",
        (
            "long-context --context-lengths 128,500,1000,2000,4000,7800 --drafters draft-model,medusa,eagle3,dspark,"
            "suffix,sparse-cache --num-prompts 2 --repeat 1 --kv-cache-dtypes default",
        ),
    ),
    Section(
        "pair",
        "A published pair",
        "Qwen2.5-Coder-1.5B-Instruct with the published 0.5B as its draft model, which is what `auto` is here: in 4 "
        "bits beside llama.cpp on the same file, in 16 beside drafts by its own weights in 4 bits, and by SmolLM2-135M "
        "across vocabularies. Chat, code and editing. Runs with a head trained for the target, which "
        "`auto` then took, or with `ensemble` are of earlier commits.",
        _paired(
            "--tasks chat,code,editing",
            "qspec,cross-vocabulary --drafter-option qspec.length=8 "
            "--drafter-option cross-vocabulary.model=smollm2-135m",
        ),
        main=True,
    ),
    Section(
        "pair-given",
        "A published pair, on given prompts",
        "As above, on a prompt file: our chat, code and editing, and 32 of Spec-Bench's questions to assistants.",
        _paired("--prompts {prompts}", "qspec --drafter-option qspec.length=8"),
        main=True,
    ),
)

_PAINTER = ("image-tokenizer", "image-tokens")
_LATE = "--rule-option annealed.weight=2,4 --rule-option annealed.nu=0.1,0.7"
_JUDGED = "--prompts held-out --dtype bfloat16 --drafter-option jacobi.window=32 --quality"

IMAGE = (
    Section(
        METHODS,
        "Every method, at temperature 0 and 1",
        "Every drafter whose weights are installed, with the exact rule and the default guidance, on the same held-out "
        "names and seeds, one image at a time.",
        _both(f"image --drafters {_CODES},medusa,spatial,eagle,eagle2 --num-prompts 32 {_DRAWN}"),
        needs=_PAINTER,
        quick=True,
    ),
    Section(
        "relaxed",
        "Relaxed rules, temperature 1",
        "Target passes saved against the change in the distribution: mean total variation per code, and the target's "
        "own negative log-likelihood (NLL) of the images.",
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
        "relaxed-greedy",
        "Relaxed rules, temperature 0",
        "What each rule accepts besides the target's own likeliest code, and at what price.",
        (
            "image --drafters jacobi --rules exact,threshold,lenience,tolerance,additive-beta,typical,top-k-membership,"
            "top-beta,bild,lantern,lantern-plus-plus,grouped,annealed --prompts held-out --dtype bfloat16 --batch-size "
            "1 --num-prompts 24 --temperature 0",
        ),
        needs=_PAINTER,
    ),
    Section(
        "quality",
        "Speed and quality, judged",
        "Four settings of each of five rules, 256 images per row: KID to real images, LPIPS to the images of "
        "plain decoding, and how often the classifier recognises the prompt. Plain decoding with other seeds shows how "
        "much of a difference is chance.",
        (
            "image --drafters jacobi --rules exact,lantern,lantern-plus-plus,annealed,grouped,tolerance --rule-option "
            "lantern.delta=0.02,0.05,0.1,0.2 --rule-option lantern-plus-plus.ratio=0.5,1,2,4 --rule-option "
            "annealed.weight=1.5,2,4,8 --rule-option grouped.span=2,4,7,12 --rule-option tolerance.tau=2,3,5,8 "
            f"{_JUDGED} --num-prompts 256 --plot {{folder}}/quality.png",
        ),
        needs=(*_PAINTER, "image-classifier"),
        pictures=("quality.png",),
        main=True,
    ),
    Section(
        "judged",
        "The best relaxed settings, on 2,000 images",
        "Compared with plain decoding with the same seeds and with others, by KID and prompt agreement.",
        (
            "image --drafters jacobi --rules annealed,grouped,tolerance --rule-option annealed.weight=4 --rule-option "
            f"annealed.nu=0.1 {_JUDGED} --num-prompts 2000",
        ),
        needs=(*_PAINTER, "image-classifier"),
        main=True,
    ),
)

_SPOKEN = (
    "medusa,hydra,eagle3,llasa-plus,jacobi,prompt-lookup,input-guided,anpd,lookahead,suffix,token-recycling,sparse-cache,"
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
        "Every drafter whose weights are installed, with the exact rule, on held-out sentences of all kinds. Speeds "
        "and their speedups are those of the language model alone; entropy is that of the target's distributions; the "
        "real-time factor is the seconds that model, codec and vocoder take for one second of sound, and the speedup "
        "from text to sound is the ratio of plain decoding's to it.",
        _both(f"speech --drafters {_SPOKEN} --num-prompts 14 --dtype bfloat16"),
        needs=_VOICE,
        quick=True,
    ),
    Section(
        "speed",
        "The fastest, by wall-clock time",
        "The drafters that save the most target passes, with the exact rule and with `tolerance` at its defaults.",
        (
            "speech --drafters jacobi,medusa,hydra,eagle3,draft-model --rules exact,tolerance --num-prompts 30 "
            f"--repeat 2 {_SAID}",
        ),
        needs=_VOICE,
        main=True,
    ),
    Section(
        "many",
        "Five hundred sentences, by wall-clock time",
        "As above, over all held-out sentences, of which the quality is judged below.",
        (f"speech --drafters jacobi --rules exact,tolerance --num-prompts 500 {_SAID}",),
        needs=_VOICE,
        main=True,
    ),
    Section(
        "relaxed",
        "Relaxed rules, judged",
        "Speech quality of each rule compared with plain decoding, the teacher, and the teacher's speech passed "
        "through the codec. Intervals are bootstrapped over sentences.",
        (
            f"speech --drafters jacobi --rules exact,{_BENT} --num-prompts 40 {_SAID} --quality --num-dnsmos 20 "
            "--plot {folder}/relaxed.png",
        ),
        needs=_HEADS,
        pictures=("relaxed.png",),
        main=True,
    ),
    Section(
        "curve",
        "Tolerance from strict to lax",
        "Tokens per target pass against word error rate, for increasing tolerance `tau`.",
        (
            f"speech {_HEARD} --rules tolerance --rule-option tolerance.tau=3,8,30,100 --num-prompts 60 {_SAID} "
            "--quality --num-dnsmos 30 --plot {folder}/curve.png",
        ),
        needs=_HEADS,
        pictures=("curve.png",),
    ),
    Section(
        "judged",
        "The default relaxed rule, judged",
        "`tolerance` at its defaults compared with plain decoding, the teacher, and the teacher's speech passed "
        "through the codec, with one sentence of every kind to listen to.",
        (
            f"speech {_HEARD} --rules tolerance --num-prompts 500 {_SAID} --quality --num-dnsmos 150 "
            "--samples {folder}/samples",
        ),
        needs=_HEADS,
        quick=True,
        main=True,
    ),
    Section(
        "human",
        "A human voice outside the training data",
        "The codec was trained on one synthetic voice. This measures it, and the vocoder alone, on a human voice: the "
        "telephone prompts recorded by Allison Smith (CC-BY-SA-3.0), compared with the recogniser's own transcript of "
        "the recordings.",
        ("codec --num-prompts 100",),
        needs=_VOICE,
    ),
)

SECTIONS: Mapping[str, tuple[Section, ...]] = {"text": TEXT, "image": IMAGE, "speech": SPEECH}

# One section is one piece of `make gpu`.
_GRAPHS = (
    "Plain decoding with and without CUDA graphs, and drafters with them: kernel launches per pass, and the time per "
    "token beside the floor, which is reading the weights once at the bandwidth measured on this device."
)
GPU = (
    Section(
        "text",
        "Text: graphs, launches and the memory floor",
        _GRAPHS + " transformers' `generate` with its dynamic and its static cache, in the same run.",
        (
            "device --device {device} --drafters prompt-lookup,suffix,eagle3,auto --num-prompts 3 --max-new-tokens 96 "
            "--repeat 3 --compare-engines",
        ),
    ),
    Section(
        "image",
        "Images: graphs, launches and the memory floor",
        _GRAPHS,
        ("device --device {device} --modality image --num-prompts 1 --max-new-tokens 256 --repeat 3",),
    ),
    Section(
        "speech",
        "Speech: graphs, launches and the memory floor",
        _GRAPHS,
        ("device --device {device} --modality speech --num-prompts 1 --max-new-tokens 256 --repeat 3",),
    ),
    Section(
        "batches",
        "Continuous batches",
        "Requests decoded side by side, with and without drafting, by batch size.",
        (
            "throughput --device {device} --drafters suffix,eagle3 --batch-sizes 1,4,16 --num-prompts 16 "
            "--max-new-tokens 48 --repeat 2",
        ),
    ),
    Section(
        "methods",
        "Drafters, greedy",
        "Drafters that need no training and those with trained heads.",
        (f"text --device {{device}} --drafters {_TRAINED} --num-prompts 14 --max-new-tokens 96",),
    ),
    Section(
        "engines",
        "Compared with other engines",
        "The same prompts in the same run. Engines that are missing are installed from the package index.",
        ("text --device {device} --drafters eagle3,auto --num-prompts 7 --max-new-tokens 96 --compare-engines",),
    ),
)
GPU_REPORT = "gpu"
REPORTS: Mapping[str, tuple[Section, ...]] = {**SECTIONS, GPU_REPORT: GPU}
