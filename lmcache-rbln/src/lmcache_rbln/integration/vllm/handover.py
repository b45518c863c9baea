# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's objects LMCache gets: copies, and requests that it can only read.

LMCache keeps and extends lists that it finds in the scheduler's output. Where engine
and worker are one process, the model runner reads the very same lists afterwards.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

# Third Party
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

# First Party
from lmcache.logging import init_logger
from lmcache_rbln.integration.vllm.request_identity import (
    CacheTerms,
    NotCacheableError,
    terms_of,
)

if TYPE_CHECKING:
    # Third Party
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: Requests that data-parallel ranks without work run; LMCache does not track them.
_MOCK = "mock_req"


class RequestView:
    """A request as LMCache sees it: vLLM's, to read, without the client's parameters.

    Args:
        request: vLLM's request, whose state is read at each access.
        terms: On which terms it is cached.

    Attributes:
        request: vLLM's request.
        terms: On which terms it is cached.
        sampling_params: Holds the request configuration of lookups, where LMCache
            looks for it.
        kv_transfer_params: Nothing: LMCache takes those of disaggregated serving at
            their word.
    """

    __slots__ = ("request", "sampling_params", "terms")
    kv_transfer_params = None

    def __init__(self, request: Request, terms: CacheTerms) -> None:
        self.request = request
        self.terms = terms
        self.sampling_params = _sampling_params(terms.lookup_configs())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def view_of(request: Request) -> RequestView | None:
    """Return what LMCache gets of a request; says once what is not followed.

    Args:
        request: vLLM's request.

    Returns:
        The view, or ``None`` if LMCache must not see the request.
    """
    if request.request_id.startswith(_MOCK):
        return None
    try:
        terms = terms_of(request)
    except NotCacheableError as reason:
        logger.warning("[req_id=%s] not cached: %s", request.request_id, reason)
        return None
    if terms.warnings:
        logger.warning("[req_id=%s] %s", request.request_id, "; ".join(terms.warnings))
    return RequestView(request, terms)


def copied_step(
    output: SchedulerOutput, views: Mapping[str, RequestView | None]
) -> SchedulerOutput:
    """Copy what LMCache reads of one step; nothing in it is vLLM's own.

    Args:
        output: What the scheduler decided.
        views: Views of its requests by id. Those without one are left out.

    Returns:
        The copy, with each new request's configuration in place of its sampling
        parameters.
    """
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = set(output.finished_req_ids)
    step.num_scheduled_tokens = dict(output.num_scheduled_tokens)
    for new in output.scheduled_new_reqs:
        view = views.get(new.req_id)
        if view is not None:
            step.scheduled_new_reqs.append(_copied_new(new, view))
    step.scheduled_cached_reqs = _copied_cached(output.scheduled_cached_reqs, views)
    return step


def _copied_new(new: NewRequestData, view: RequestView) -> NewRequestData:
    return replace(
        new,
        prompt_token_ids=list(new.prompt_token_ids or ()),
        mm_features=list(new.mm_features),
        sampling_params=_sampling_params(view.terms.configs()),
        pooling_params=None,
        block_ids=_copied_blocks(new.block_ids),
        prefill_token_ids=None,
    )


def _copied_cached(
    cached: CachedRequestData, views: Mapping[str, RequestView | None]
) -> CachedRequestData:
    kept = [
        place
        for place, request_id in enumerate(cached.req_ids)
        if views.get(request_id) is not None
    ]
    ids = [cached.req_ids[place] for place in kept]
    # Only pipeline parallelism sends tokens.
    tokens = cached.new_token_ids
    return CachedRequestData(
        req_ids=ids,
        resumed_req_ids=cached.resumed_req_ids.intersection(ids),
        new_token_ids=[list(tokens[place]) for place in kept] if tokens else [],
        all_token_ids={
            request_id: list(cached.all_token_ids[request_id])
            for request_id in ids
            if request_id in cached.all_token_ids
        },
        new_block_ids=[_copied_blocks(cached.new_block_ids[place]) for place in kept],
        num_computed_tokens=[cached.num_computed_tokens[place] for place in kept],
        num_output_tokens=[cached.num_output_tokens[place] for place in kept],
    )


def _copied_blocks(block_ids: Any) -> Any:
    return None if block_ids is None else tuple(list(group) for group in block_ids)


def _sampling_params(configs: dict[str, Any]) -> Any:
    """Sampling parameters, as far as LMCache reads them."""
    return SimpleNamespace(extra_args={"kv_transfer_params": configs})
