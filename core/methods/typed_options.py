"""Typed options of drafters, for mypy and editors: `Eagle3Options(nodes=15)` is the dictionary {"nodes": 15}.

Names, types and defaults are those of the class or function that makes the drafter. Combined drafters take
dictionaries, because their options depend on their members.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, overload

from outrider.core.drafters.draft_model.cross_vocabulary import cross_vocabulary
from outrider.core.drafters.draft_model.cs_drafting import CSDrafting
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.drafters.draft_model.overlapped import Overlapped
from outrider.core.drafters.draft_model.pearl import Pearl
from outrider.core.drafters.draft_model.sequoia import Sequoia
from outrider.core.drafters.draft_model.specexec import SpecExec
from outrider.core.drafters.draft_model.specinfer import SpecInfer
from outrider.core.drafters.lookup.input_guided import InputGuided
from outrider.core.drafters.lookup.ngram import ANPD, NGrammys
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.lookup.retrieval import REST
from outrider.core.drafters.lookup.sam import SamDecoding
from outrider.core.drafters.lookup.suffix import Suffix
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.drafters.parallel_decoding.lookahead import Lookahead
from outrider.core.drafters.self_speculative.layer_skip import draft_on_the_fly, draft_verify, swift
from outrider.core.drafters.self_speculative.sparse_view import qspec, sparse_cache, triforce
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.eagle import eagle2
from outrider.core.drafters.trained.lookahead_embeddings import PaSS

P = ParamSpec("P")


@overload
def _typed(make: Callable[Concatenate[Any, P], object]) -> Callable[P, dict[str, Any]]: ...
@overload
def _typed(make: Callable[P, object]) -> Callable[P, dict[str, Any]]: ...
def _typed(make: Callable[..., object]) -> Callable[..., dict[str, Any]]:
    """A function that takes the optional keyword arguments of `make` and returns them as a dictionary. Required ones,
    such as a draft model or a trained head, come from the model that decodes."""
    parameters = inspect.signature(make).parameters.values()
    signature = inspect.Signature([each for each in parameters if each.kind is each.KEYWORD_ONLY])

    def options(**given: Any) -> dict[str, Any]:
        signature.bind(**given)
        return given

    options.__signature__ = signature  # type: ignore[attr-defined]
    options.__doc__ = f"Options of {make.__name__}."
    options.__wrapped__ = make  # type: ignore[attr-defined]
    return options


PromptLookupOptions = _typed(PromptLookup)
InputGuidedOptions = _typed(InputGuided)
RestOptions = _typed(REST)
AnpdOptions = _typed(ANPD)
NGrammysOptions = _typed(NGrammys)
SuffixOptions = _typed(Suffix)
SamDecodingOptions = _typed(SamDecoding)
TokenRecyclingOptions = _typed(TokenRecycling)
JacobiOptions = _typed(Jacobi)
LookaheadOptions = _typed(Lookahead)
DraftModelOptions = _typed(DraftModel)
SampledTreeOptions = _typed(SampledTree)
TopKTreeOptions = _typed(TopKTree)
DynamicTreeOptions = _typed(DynamicTree)
SpecinferOptions = _typed(SpecInfer)
SpecexecOptions = _typed(SpecExec)
PredraftedOptions = _typed(Overlapped)
PearlOptions = _typed(Pearl)
CsDraftingOptions = _typed(CSDrafting)
CrossVocabularyOptions = _typed(cross_vocabulary)
SequoiaOptions = _typed(Sequoia)
SpecdecPlusPlusOptions = _typed(DraftModel)
BildOptions = _typed(DraftModel)
OnTheFlyWindowOptions = _typed(DraftModel)
SparseCacheOptions = _typed(sparse_cache)
TriforceOptions = _typed(triforce)
QspecOptions = _typed(qspec)
DraftVerifyOptions = _typed(draft_verify)
SwiftOptions = _typed(swift)
DraftOnTheFlyOptions = _typed(draft_on_the_fly)
MedusaOptions = _typed(Learned)
SpatialOptions = _typed(Learned)
HydraOptions = _typed(Learned)
EagleOptions = _typed(Learned)
Eagle2Options = _typed(eagle2)
Eagle3Options = _typed(Learned)
BlockwiseOptions = _typed(Learned)
AmphistaOptions = _typed(Learned)
DflashOptions = _typed(Learned)
Dflash2Options = _typed(Learned)
DsparkOptions = _typed(Learned)
DflyOptions = _typed(Learned)
DominoOptions = _typed(Learned)
PEagleOptions = _typed(Learned)
SpecdecOptions = _typed(Learned)
FalconOptions = _typed(Learned)
PassOptions = _typed(PaSS)
LayerSkipOptions = _typed(Learned)
KangarooOptions = _typed(Learned)
MtpOptions = _typed(Learned)
LlasaPlusOptions = _typed(Learned)
CtcOptions = _typed(Learned)
