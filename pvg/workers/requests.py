"""Blocks of generation requests and their completions as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pvg.records import Timing, VersionSpan
from pvg.rollout.engine import Completion, CutShort, GenerationRequest, PartialCompletion, Sampling
from pvg.workers.frames import Array, Arrays, Frame, ragged, rows_of


def block_of(requests: Sequence[GenerationRequest]) -> Frame:
    """A frame "generate" for these requests. `GenerationRequest.on_tokens` stays with the driver."""
    samplings = list(dict.fromkeys(request.sampling for request in requests))
    arrays = {
        **ragged("prompts", [request.prompt_ids for request in requests], np.int32),
        "seeds": np.array([request.seed for request in requests], dtype=np.uint64),
        "samplings": np.array([samplings.index(request.sampling) for request in requests], dtype=np.int32),
    }
    resumed = {}
    for index, request in enumerate(requests):
        if request.resumed_from is not None:
            fields, own = _partial(request.resumed_from, f"resumed_from.{index}.")
            resumed[str(index)] = fields
            arrays |= own
    plain = [[s.max_tokens, list(s.stop_ids), s.temperature, s.top_p, s.top_k] for s in samplings]
    return Frame(
        "generate",
        {
            "ids": [request.id for request in requests],
            "groups": [request.group for request in requests],
            "samplings": plain,
            "resumed_from": resumed,
        },
        arrays,
    )


def requests_of(frame: Frame) -> list[GenerationRequest]:
    """The inverse of `block_of`."""
    fields, arrays = frame.fields, frame.arrays
    samplings = [Sampling(most, tuple(stops), *rest) for most, stops, *rest in fields["samplings"]]
    return [
        GenerationRequest(
            id_,
            prompt_ids,
            samplings[sampling],
            int(seed),
            resumed_from=_partial_of(fields["resumed_from"][str(index)], arrays, f"resumed_from.{index}.")
            if str(index) in fields["resumed_from"]
            else None,
            group=group,
        )
        for index, (id_, prompt_ids, sampling, seed, group) in enumerate(
            zip(
                fields["ids"],
                rows_of("prompts", arrays),
                arrays["samplings"].tolist(),
                arrays["seeds"].tolist(),
                fields["groups"],
                strict=True,
            )
        )
    ]


def completion_arrays(delivered: Mapping[int, Completion | CutShort]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Finished and cut completions of a block, by the index of their request."""
    finished = {index: found for index, found in delivered.items() if isinstance(found, Completion)}
    arrays: dict[str, Array] = {
        **ragged("tokens", [found.token_ids for found in finished.values()], np.int32),
        **ragged("logprobs", [found.logprobs for found in finished.values()], np.float32),
        "timing": np.array([[f.timing.queued_s, f.timing.service_s] for f in finished.values()], dtype=np.float64),
    }
    if any(found.routed_experts is not None for found in finished.values()):
        experts = [found.routed_experts for found in finished.values()]
        arrays |= ragged("experts", [rows for rows in experts if rows is not None], np.uint8)
    cut: dict[str, Any] = {}
    for index, found in delivered.items():
        if isinstance(found, CutShort):
            cut[str(index)] = None
            if found.partial is not None:
                cut[str(index)], own = _partial(found.partial, f"cut.{index}.")
                arrays |= own
    fields = {
        "indexes": list(finished),
        "spans": [_plain_spans(found.spans) for found in finished.values()],
        "finish": [found.finish_reason for found in finished.values()],
        "cut": cut,
    }
    return fields, arrays


def completions_of(frame: Frame, requests: Sequence[GenerationRequest]) -> dict[int, Completion | CutShort]:
    """The inverse of `completion_arrays` for a block of these requests."""
    fields, arrays = frame.fields, frame.arrays
    experts = rows_of("experts", arrays) if "experts" in arrays else [None] * len(fields["indexes"])
    found: dict[int, Completion | CutShort] = {}
    for index, ids, logprobs, timing, spans, finish, routed in zip(
        fields["indexes"],
        rows_of("tokens", arrays),
        rows_of("logprobs", arrays),
        arrays["timing"].tolist(),
        fields["spans"],
        fields["finish"],
        experts,
        strict=True,
    ):
        # Copies: a view would keep the whole message in memory.
        own = None if routed is None else routed.copy()
        found[index] = Completion(
            requests[index].id, ids.copy(), logprobs.copy(), _spans(spans), finish, Timing(*timing), own
        )
    for index, partial in fields["cut"].items():
        cut_short = None if partial is None else _partial_of(partial, arrays, f"cut.{index}.")
        found[int(index)] = CutShort(cut_short)
    return found


def _partial(completion: PartialCompletion, prefix: str) -> tuple[dict[str, Any], dict[str, Array]]:
    arrays: dict[str, Array] = {f"{prefix}tokens": completion.token_ids, f"{prefix}logprobs": completion.logprobs}
    if completion.routed_experts is not None:
        arrays[f"{prefix}experts"] = completion.routed_experts
    timing = [completion.timing.queued_s, completion.timing.service_s]
    return {"spans": _plain_spans(completion.spans), "timing": timing}, arrays


def _partial_of(fields: Mapping[str, Any], arrays: Arrays, prefix: str) -> PartialCompletion:
    experts = arrays.get(f"{prefix}experts")
    return PartialCompletion(
        arrays[f"{prefix}tokens"].copy(),
        arrays[f"{prefix}logprobs"].copy(),
        _spans(fields["spans"]),
        Timing(*fields["timing"]),
        None if experts is None else experts.copy(),
    )


def _plain_spans(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.start, span.version] for span in spans]


def _spans(plain: Sequence[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start, version) for start, version in plain)
