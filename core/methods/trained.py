"""Rows of the trained drafters. Each has its draft head, and settings of a small one for tests. Over 400 lines, being
one table."""

from __future__ import annotations

from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock, SpecDecBlock
from outrider.core.drafters.trained.blocks.chained import DFlyBlock, DominoBlock, DSparkBlock
from outrider.core.drafters.trained.blocks.path_selector import DFlash2Block
from outrider.core.drafters.trained.ctc import CtcFrames
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead, eagle2
from outrider.core.drafters.trained.early_exit import ExitHead, KangarooHead
from outrider.core.drafters.trained.falcon import FalconHead
from outrider.core.drafters.trained.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.trained.lookahead_embeddings import LookaheadEmbeddings, PaSS
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.drafters.trained.parallel_eagle import PEagleHead
from outrider.core.drafters.trained.parallel_heads import AmphistaHeads, BlockwiseHeads, CascadedModules
from outrider.core.drafters.trained.spatial import SpatialHeads
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

_WHILE_LIKELY = {"min_probability": 0.1}  # a guess that is less likely does not pay for its place in a pass

# Speech distributions have high entropy, so sampled drafts with many nodes on the first level work best. These trees
# are the best of 16 nodes by acceptance on 24 sentences at temperature 0.6 (outrider.speech.evaluation.tree_search).
# Relaxed rules accept the most probable tokens more often than sampled ones, so under them drafts are fixed guesses.
_WIDE = (-1, -1, -1, -1, -1, 0, 0, 0, 1, 1)

MEDUSA = Method(
    name="medusa",
    make=Learned,
    draft_head=MedusaHeads,
    systems=("Medusa",),
    summary="predicts each of the next tokens with its own head on the target's last state; drafts a tree",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    vllm="medusa",
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"speech": {"draft_kind": "sampled", "tree": (*_WIDE, 2, 3, 4, 5, 6, 8)}},
    relaxed_defaults={"speech": {"draft_kind": "tree", "nodes": 24}},
    test_head_options={"heads": 2, "layers": 2, "vocabulary": (2, 0)},
    test_options=(
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
    systems=("Heads that look right and below (spatial)",),
    summary="predicts image codes with heads on the target's last state and on the state one row above",
    paper="Spatially Speculative Decoding (arXiv 2606.20543)",
    topology=("tree", "chain"),
    modalities=("image",),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"heads": 2, "columns": 3, "vocabulary": (2, 0)},
    test_options=(
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
    summary="predicts with heads that also read the tokens drafted before theirs; drafts a dynamic tree",
    paper="Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (arXiv 2402.05109)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    merged_defaults=_WHILE_LIKELY,
    defaults={"speech": {"draft_kind": "sampled", "tree": (*_WIDE, 1, 2, 3, 5, 5, 6)}},
    relaxed_defaults={"speech": {"draft_kind": "dynamic", "nodes": 24}},
    test_head_options={"heads": 2, "vocabulary": (2, 0)},
    test_options=(
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
    summary="predicts the target's next states token by token with one layer; drafts a static tree",
    paper="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv 2401.15077)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"normed": False},
    test_options=(
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
    summary="drafts a dynamic tree with EAGLE's layer, and keeps its most probable nodes",
    paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    merged_defaults=_WHILE_LIKELY,
    test_options=({"nodes": 3, "width": 2, "depth": 2}, {"nodes": 3, "width": 2, "depth": 2, "min_probability": 0.3}),
)

EAGLE3 = Method(
    name="eagle3",
    make=Learned,
    draft_head=Eagle3Head,
    systems=("EAGLE-3", "EAGLE-3.1"),
    summary="drafts with one layer that reads target states of three depths, over a reduced vocabulary",
    paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test "
    "(arXiv 2503.01840)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    vllm="eagle3",
    inputs={"head": Input.DRAFT_HEAD},
    merged_defaults=_WHILE_LIKELY,
    defaults={"speech": {"draft_kind": "sampled", "tree": (-1, -1, -1, -1, -1, -1, 0, 0, 0, 1, 2, 3, 6, 6, 7, 12)}},
    relaxed_defaults={"speech": {"draft_kind": "tree", "nodes": 24}},
    test_head_options={"taps": ("layer.0", "layer.1", "last"), "vocabulary": (2, 0)},
    test_options=(
        {"nodes": 3, "width": 2, "depth": 2},
        {"draft_kind": "tree", "tree": (-1, -1, 0)},
        {"draft_kind": "chain", "length": 3},
        {"draft_kind": "sampled", "tree": (-1, -1, 1)},
    ),
)

P_EAGLE = Method(
    name="p-eagle",
    make=Learned,
    draft_head=PEagleHead,
    systems=("P-EAGLE",),
    summary="guesses all draft positions in one pass of EAGLE-3's layer, with a learned state for unknown ones",
    paper="P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (arXiv 2602.01469)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"taps": ("layer.0", "last"), "depth": 2, "vocabulary": (2, 0)},
    test_options=(
        {"tree": (-1, -1, 0)},
        {"draft_kind": "dynamic", "nodes": 3, "depth": 2, "min_probability": 0.2},
        {"draft_kind": "chain", "length": 2, "policy": "budget", "price": 0.3},
    ),
)

BLOCKWISE = Method(
    name="blockwise",
    make=Learned,
    draft_head=BlockwiseHeads,
    systems=("Blockwise decoding",),
    summary="drafts a chain with residual heads on the target's last state",
    paper="Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"heads": 2, "hidden": 4},
    test_options=({"length": 2},),
)

AMPHISTA = Method(
    name="amphista",
    make=Learned,
    draft_head=AmphistaHeads,
    systems=("Amphista",),
    summary="drafts with heads that attend to each other, after two layers that adapt the target's states",
    paper="Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference (arXiv 2406.13170)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"heads": 2},
    test_options=({"tree": (-1, -1, 0)}, {"draft_kind": "chain", "length": 2}),
)

DFLASH = Method(
    name="dflash",
    make=Learned,
    draft_head=DFlashBlock,
    systems=("DFlash",),
    summary="fills a block of mask tokens at once with layers that read the target's states",
    paper="DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"block": 2, "layers": 2, "taps": ("layer.0", "last"), "vocabulary": (2, 0)},
    test_options=({"nodes": 3, "depth": 2}, {"draft_kind": "chain", "length": 2}),
)

DSPARK = Method(
    name="dspark",
    make=Learned,
    draft_head=DSparkBlock,
    systems=("DSpark",),
    summary="corrects DFlash's block left to right by the previous token, and ends it where its confidence is low",
    paper="DSpark (arXiv 2607.05147)",
    topology=("chain", "tree"),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"text": {"length": 7}},
    test_head_options={"block": 2, "rank": 2, "taps": ("layer.0", "last")},
    test_options=({"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2}, {"length": 2}),
)

DFLASH2 = Method(
    name="dflash2",
    make=Learned,
    draft_head=DFlash2Block,
    systems=("DFlash 2",),
    summary="adds a convolution to DFlash's block, and joins the best candidates of adjacent positions into one path",
    paper="DFlash 2 (Inco AI and Z Lab, https://inco.ai/blog/dflash2/)",
    topology=("chain", "tree"),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"text": {"length": 7}},
    test_head_options={"block": 2, "candidates": 2, "rank": 2, "group": 1, "taps": ("layer.0", "last")},
    test_options=(
        {"length": 2},
        {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2},
        {"length": 2, "policy": "budget", "price": 0.3},
        {"draft_kind": "sampled", "tree": (-1, -1, 0)},
    ),
)

DFLY = Method(
    name="dfly",
    make=Learned,
    draft_head=DFlyBlock,
    systems=("DFly",),
    summary="gives each layer of DFlash's block its own mixture of target states, and corrects it left to right",
    paper="AngelSpec: Towards Real-World High Performance Inference with Speculative Decoding (arXiv 2607.25852)",
    topology=("chain", "tree"),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"text": {"length": 7}},
    test_head_options={"block": 2, "layers": 2, "correction": 3, "taps": ("layer.0", "last"), "vocabulary": (2, 0)},
    test_options=(
        {"length": 2, "price": 0.3},
        {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2},
        {"length": 2, "policy": "confident", "risk": 0.4},
    ),
)

DOMINO = Method(
    name="domino",
    make=Learned,
    draft_head=DominoBlock,
    systems=("Domino",),
    summary="corrects DFlash's block left to right by a recurrent network over the tokens drafted before",
    paper="Domino (arXiv 2605.29707)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"text": {"length": 7}},
    test_head_options={"block": 2, "recurrent": 3, "rank": 2, "taps": ("layer.0", "last")},
    test_options=(
        {"length": 2},
        {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2},
        {"length": 2, "policy": "budget", "price": 0.3},
    ),
)

SPECDEC = Method(
    name="specdec",
    make=Learned,
    draft_head=SpecDecBlock,
    systems=("SpecDec",),
    summary="fills all draft positions at once with an independent encoder-decoder model",
    paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
    "(arXiv 2203.16487)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"block": 2, "encoder": 1},
    test_options=({"length": 2},),
)

FALCON = Method(
    name="falcon",
    make=Learned,
    draft_head=FalconHead,
    systems=("Falcon",),
    summary="predicts several states per pass of an LSTM and a draft layer; drafts a static tree",
    paper="Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive "
    "Drafting and Custom-Designed Decoding Tree (arXiv 2412.12639)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"block": 2, "anchors": 4, "hidden": 3},
    test_options=(
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
    summary="drafts with the target itself on learned embeddings, in the pass that verifies the last draft",
    paper="PaSS: Parallel Speculative Sampling (arXiv 2311.13581)",
    topology=("chain", "tree"),
    capabilities=(Capability.STANDALONE, Capability.WEIGHT_FREE),
    modalities=("text",),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"embeddings": 2, "anchors": 4},
    test_options=({}, {"tree": (-1, -1, 0)}, {"separate_passes": True}),
)

LAYER_SKIP = Method(
    name="layer-skip",
    make=Learned,
    draft_head=ExitHead,
    systems=("LayerSkip",),
    summary="drafts with the target's first layers and a trained exit; verification reuses their states",
    paper="LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (arXiv 2404.16710)",
    topology=("chain", "tree"),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"exit": 1, "hidden": 4},
    test_options=({"length": 2}, {"draft_kind": "tree", "tree": (-1, -1, 0)}),
)

KANGAROO = Method(
    name="kangaroo",
    make=Learned,
    draft_head=KangarooHead,
    systems=("Kangaroo",),
    summary="drafts with the target's first layers and a trained adapter while its confidence is high",
    paper="Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (arXiv 2404.18911)",
    topology=("chain", "tree"),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"text": {"length": 6}},
    test_head_options={"exit": 1},
    test_options=({"length": 2, "threshold": 0.3}, {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 2}),
)

MTP = Method(
    name="mtp",
    make=Learned,
    draft_head=MtpModules,
    systems=("MTP (DeepSeek)", "FastMTP"),
    summary="predicts tokens with a sequence of modules, or one reused, from the previous state and token",
    paper="DeepSeek-V3 Technical Report (arXiv 2412.19437)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"modules": 2},
    test_options=({"length": 3}, {"draft_kind": "dynamic", "nodes": 3, "width": 2, "depth": 3}),
)

LLASA_PLUS = Method(
    name="llasa-plus",
    make=Learned,
    draft_head=CascadedModules,
    systems=("Llasa+",),
    summary="predicts two more tokens with two layers, one after the other, on the target's states of all tokens",
    paper="Llasa+: Free Lunch for Accelerated and Streaming Llama-Based Speech Synthesis (arXiv 2508.06262)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    defaults={"speech": {"draft_kind": "sampled", "tree": (-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 2, 3)}},
    relaxed_defaults={"speech": {"draft_kind": "tree", "nodes": 24}},
    test_head_options={"modules": 2, "vocabulary": (2, 0)},
    test_options=({"length": 2}, {"draft_kind": "tree", "tree": (-1, -1, 0)}),
)

CTC = Method(
    name="ctc",
    make=Learned,
    draft_head=CtcFrames,
    systems=("CTC drafting",),
    summary="predicts the next tokens at once as CTC frames, and removes blanks and repeats before verification",
    paper="Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration (arXiv 2412.00061)",
    topology=("tree", "chain"),
    capabilities=(Capability.BATCHED,),
    inputs={"head": Input.DRAFT_HEAD},
    test_head_options={"frames": 3, "length": 2},
    test_options=({"nodes": 4, "depth": 2},),
)

ROWS = (
    MEDUSA,
    SPATIAL,
    HYDRA,
    EAGLE,
    EAGLE2,
    EAGLE3,
    P_EAGLE,
    BLOCKWISE,
    AMPHISTA,
    DFLASH,
    DFLASH2,
    DSPARK,
    DFLY,
    DOMINO,
    SPECDEC,
    FALCON,
    PASS,
    LAYER_SKIP,
    KANGAROO,
    MTP,
    LLASA_PLUS,
    CTC,
)
