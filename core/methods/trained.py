"""Rows of the drafters that are trained on their target. Each names its draft head, with a small one's settings for
the tests."""

from __future__ import annotations

from outrider.core.drafters.trained.block_diffusion import DFlashBlock, DSparkBlock, SpecDecBlock
from outrider.core.drafters.trained.ctc import CtcFrames
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead, eagle2
from outrider.core.drafters.trained.early_exit import ExitHead, KangarooHead
from outrider.core.drafters.trained.falcon import FalconHead
from outrider.core.drafters.trained.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.trained.lookahead_embeddings import LookaheadEmbeddings, PaSS
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.drafters.trained.parallel_heads import AmphistaHeads, BlockwiseHeads
from outrider.core.drafters.trained.spatial import SpatialHeads
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

# Distributions of speech are wide: sampled guesses do best there, many side by side at first. These trees are the best
# of 16 nodes by the acceptance of 24 sentences at temperature 0.6 (outrider.speech.evaluation.tree_search). A relaxed
# rule accepts the likeliest tokens more often than sampled ones, so that under it drafts are fixed guesses.
_WIDE = (-1, -1, -1, -1, -1, 0, 0, 0, 1, 1)

MEDUSA = Method(
    name="medusa",
    make=Learned,
    draft_head=MedusaHeads,
    systems=("Medusa",),
    summary="heads on the target's last state, each for one of the next tokens; a tree of their likeliest",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
    topology=("tree", "chain"),
    vllm="medusa",
    inputs={"draft_head": Input.DRAFT_HEAD},
    defaults={"speech": {"draft_kind": "sampled", "tree": (*_WIDE, 2, 3, 4, 5, 6, 8)}},
    relaxed_defaults={"speech": {"draft_kind": "tree", "nodes": 24}},
    small={"heads": 2, "layers": 2, "vocabulary": (2, 0)},
    trials=(
        {"tree": (-1, -1, 0)},
        {"draft_kind": "dynamic", "nodes": 2, "depth": 2},
        {"draft_kind": "chain", "length": 2},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

SPATIAL = Method(
    name="spatial",
    make=Learned,
    draft_head=SpatialHeads,
    systems=("Hawk", "Heads that look right and below (spatial)"),
    summary="heads that see the target's last state and its state above the place they guess; a tree",
    paper="Hawk: Leveraging Spatial Context for Faster Autoregressive Text-to-Image Generation (arXiv 2510.25739)",
    topology=("tree", "chain"),
    modalities=("image",),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"heads": 2, "columns": 3, "vocabulary": (2, 0)},
    trials=(
        {"tree": (-1, -1, 0)},
        {"draft_kind": "dynamic", "nodes": 2, "depth": 2},
        {"draft_kind": "chain", "length": 2},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

HYDRA = Method(
    name="hydra",
    make=Learned,
    draft_head=HydraHeads,
    systems=("Hydra",),
    summary="heads that also see the tokens drafted before theirs; a tree that grows where they are sure",
    paper="Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (arXiv 2402.05109)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    defaults={"speech": {"draft_kind": "sampled", "tree": (*_WIDE, 1, 2, 3, 5, 5, 6)}},
    relaxed_defaults={"speech": {"draft_kind": "dynamic", "nodes": 24}},
    small={"heads": 2, "vocabulary": (2, 0)},
    trials=(
        {"draft_kind": "tree", "tree": (-1, -1, 0, 1)},
        {"nodes": 3, "width": 2, "depth": 2},
        {"draft_kind": "chain", "length": 2, "policy": "confidence"},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

EAGLE = Method(
    name="eagle",
    make=Learned,
    draft_head=EagleHead,
    systems=("EAGLE",),
    summary="one layer foresees the target's next states, token after token; a static tree",
    paper="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv 2401.15077)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"normed": False},
    trials=(
        {"tree": (-1, -1, 0)},
        {"draft_kind": "chain", "length": 2},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

EAGLE2 = Method(
    name="eagle2",
    make=eagle2,
    draft_head=EagleHead,
    systems=("EAGLE-2",),
    summary="EAGLE's layer; a tree that grows where it is sure of itself, re-ranked as a whole",
    paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    trials=({"nodes": 3, "width": 2, "depth": 2}, {"nodes": 3, "width": 2, "depth": 2, "min_probability": 0.3}),
)

EAGLE3 = Method(
    name="eagle3",
    make=Learned,
    draft_head=Eagle3Head,
    systems=("EAGLE-3", "EAGLE-3.1"),
    summary="one layer on states tapped at three depths, trained on its own states, with fewer words",
    paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test "
    "(arXiv 2503.01840)",
    topology=("tree", "chain"),
    vllm="eagle3",
    inputs={"draft_head": Input.DRAFT_HEAD},
    defaults={"speech": {"draft_kind": "sampled", "tree": (-1, -1, -1, -1, -1, -1, 0, 0, 0, 1, 2, 3, 6, 6, 7, 12)}},
    relaxed_defaults={"speech": {"draft_kind": "tree", "nodes": 24}},
    small={"taps": ("layer.0", "layer.1", "last"), "vocabulary": (2, 0)},
    trials=(
        {"nodes": 3, "width": 2, "depth": 2},
        {"draft_kind": "tree", "tree": (-1, -1, 0)},
        {"draft_kind": "chain", "length": 3},
        {"draft_kind": "sampled", "tree": (-1, -1, 1)},
    ),
)

BLOCKWISE = Method(
    name="blockwise",
    make=Learned,
    draft_head=BlockwiseHeads,
    systems=("Blockwise decoding",),
    summary="residual heads on the target's last state, a chain; verifying and predicting are one pass",
    paper="Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115)",
    topology=("chain", "tree"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"heads": 2, "hidden": 4},
    trials=({"length": 2},),
)

AMPHISTA = Method(
    name="amphista",
    make=Learned,
    draft_head=AmphistaHeads,
    systems=("Amphista",),
    summary="heads that look at one another both ways, behind two layers that adapt the target's states",
    paper="Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference (arXiv 2406.13170)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"heads": 2},
    trials=({"tree": (-1, -1, 0)}, {"draft_kind": "chain", "length": 2}),
)

DFLASH = Method(
    name="dflash",
    make=Learned,
    draft_head=DFlashBlock,
    systems=("DFlash",),
    summary="a block of masks filled in at once by layers that read the target's tapped states",
    paper="DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"block": 2, "layers": 2, "taps": ("layer.0", "last"), "vocabulary": (2, 0)},
    trials=({"nodes": 3, "depth": 2}, {"draft_kind": "chain", "length": 2}),
)

DSPARK = Method(
    name="dspark",
    make=Learned,
    draft_head=DSparkBlock,
    systems=("DSpark",),
    summary="DFlash's block, corrected from left to right by the token before; can stop where it is unsure",
    paper="DSpark (arXiv 2607.05147)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"block": 2, "rank": 2, "taps": ("layer.0", "last")},
    trials=({"nodes": 3, "width": 2, "depth": 2}, {"draft_kind": "chain", "length": 2, "policy": "confident"}),
)

SPECDEC = Method(
    name="specdec",
    make=Learned,
    draft_head=SpecDecBlock,
    systems=("SpecDec",),
    summary="an independent drafter: deep encoder, shallow decoder, one query a place, all filled in at once",
    paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
    "(arXiv 2203.16487)",
    topology=("chain", "tree"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"block": 2, "encoder": 1},
    trials=({"length": 2},),
)

FALCON = Method(
    name="falcon",
    make=Learned,
    draft_head=FalconHead,
    systems=("Falcon",),
    summary="several states foreseen in one pass, the next pass going on from what was drafted; a static tree",
    paper="Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive "
    "Drafting and Custom-Designed Decoding Tree (arXiv 2412.12639)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"block": 2, "anchors": 4},
    trials=(
        {"tree": (-1, -1, 0)},
        {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 3},
        {"draft_kind": "chain", "length": 3},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

PASS = Method(
    name="pass",
    make=PaSS,
    draft_head=LookaheadEmbeddings,
    systems=("PaSS",),
    summary="the target itself guesses behind learned inputs, in the pass that verifies its last guesses",
    paper="PaSS: Parallel Speculative Sampling (arXiv 2311.13581)",
    topology=("chain", "tree"),
    capabilities=(Capability.STANDALONE, Capability.WEIGHT_FREE),
    modalities=("text",),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"embeddings": 2, "anchors": 4},
    trials=({}, {"tree": (-1, -1, 0)}, {"separate_passes": True}),
)

LAYER_SKIP = Method(
    name="layer-skip",
    make=Learned,
    draft_head=ExitHead,
    systems=("LayerSkip",),
    summary="the target's first layers and a trained exit draft; verifying goes on from their states",
    paper="LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (arXiv 2404.16710)",
    topology=("chain", "tree"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"exit": 1, "hidden": 4},
    trials=({"length": 2}, {"draft_kind": "tree", "tree": (-1, -1, 0)}),
)

KANGAROO = Method(
    name="kangaroo",
    make=Learned,
    draft_head=KangarooHead,
    systems=("Kangaroo",),
    summary="the target's first layers and a trained adapter of one attention draft until unsure",
    paper="Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (arXiv 2404.18911)",
    topology=("chain", "tree"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"exit": 1},
    trials=({"length": 2, "policy": "confidence"}, {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2}),
)

MTP = Method(
    name="mtp",
    make=Learned,
    draft_head=MtpModules,
    systems=("MTP (DeepSeek)", "FastMTP"),
    summary="modules one after another, each on the state before it and the next token; or one, used again",
    paper="DeepSeek-V3 Technical Report (arXiv 2412.19437)",
    topology=("chain", "tree"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"modules": 2},
    trials=({"length": 3}, {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 3}),
)

CTC = Method(
    name="ctc",
    make=Learned,
    draft_head=CtcFrames,
    systems=("CTC drafting",),
    summary="frames with blanks and repeats for the next tokens at once, collapsed before they are verified",
    paper="Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration (arXiv 2412.00061)",
    topology=("tree", "chain"),
    inputs={"draft_head": Input.DRAFT_HEAD},
    small={"frames": 3, "length": 2},
    trials=({"nodes": 4, "depth": 2},),
)

ROWS = (
    MEDUSA,
    SPATIAL,
    HYDRA,
    EAGLE,
    EAGLE2,
    EAGLE3,
    BLOCKWISE,
    AMPHISTA,
    DFLASH,
    DSPARK,
    SPECDEC,
    FALCON,
    PASS,
    LAYER_SKIP,
    KANGAROO,
    MTP,
    CTC,
)
