"""How Gymnasium's vector environments and space utilities handle the spaces of art_gym.

Gymnasium batches custom spaces as tuples already; what it lacks for them is observation mode "different" and shared memory, which is the
default of `AsyncVectorEnv`, so that without this `gymnasium.make_vec(id, vectorization_mode="async")` would fail. Neither space can be
flattened to an array; flattening a space that holds one leaves it as it is.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from copy import deepcopy
from multiprocessing.heap import BufferWrapper
from typing import Any, cast

from gymnasium import Space, spaces
from gymnasium.spaces.utils import flatten, flatten_space, is_space_dtype_shape_equiv, unflatten
from gymnasium.vector.utils import batch_differing_spaces, create_empty_array
from gymnasium.vector.utils.shared_memory import create_shared_memory, read_from_shared_memory, write_to_shared_memory

from art_gym.messages import AssistantMessage, Observation
from art_gym.spaces import ChatSpace, ToolCallSpace

SLOT_BYTES = 16 * 2**20
"""Room for one environment's observation. The memory is a sparse file: only what is written takes space."""

_HEADER_BYTES = 8


class ChatMemory:
    """Memory that several processes share, with one slot of JSON text for each environment's latest observation."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._buffer = BufferWrapper(n * SLOT_BYTES)

    def __len__(self) -> int:
        return self._n

    def write(self, index: int, observation: Observation) -> None:
        data = json.dumps(observation).encode()
        if len(data) + _HEADER_BYTES > SLOT_BYTES:
            raise ValueError(
                f"an observation of {len(data)} bytes is too large for shared memory, which has {SLOT_BYTES} for each: "
                "use AsyncVectorEnv(..., shared_memory=False)"
            )
        start = index * SLOT_BYTES
        memory = self._buffer.create_memoryview()
        memory[start : start + _HEADER_BYTES] = len(data).to_bytes(_HEADER_BYTES, "little")
        memory[start + _HEADER_BYTES : start + _HEADER_BYTES + len(data)] = data

    def read(self, index: int) -> Observation:
        start = index * SLOT_BYTES
        memory = self._buffer.create_memoryview()
        size = int.from_bytes(memory[start : start + _HEADER_BYTES], "little")
        return tuple(json.loads(bytes(memory[start + _HEADER_BYTES : start + _HEADER_BYTES + size]))) if size else ()


class LiveObservations(Sequence[Observation]):
    """The observations that lie in shared memory right now; copying it gives them as a plain tuple."""

    def __init__(self, memory: ChatMemory) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Observation]:
        return (self._memory.read(index) for index in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[Observation, ...]:
        return tuple(self)


@create_shared_memory.register(ChatSpace)
def _create_shared_memory(space: ChatSpace, n: int = 1, ctx: Any = multiprocessing) -> ChatMemory:
    return ChatMemory(n)


@read_from_shared_memory.register(ChatSpace)
def _read_from_shared_memory(space: ChatSpace, shared_memory: ChatMemory, n: int = 1) -> LiveObservations:
    return LiveObservations(shared_memory)


@write_to_shared_memory.register(ChatSpace)
def _write_to_shared_memory(space: ChatSpace, index: int, value: Observation, shared_memory: ChatMemory) -> None:
    shared_memory.write(index, value)


@is_space_dtype_shape_equiv.register(ChatSpace)
@is_space_dtype_shape_equiv.register(ToolCallSpace)
def _is_equivalent(space_1: Space[Any], space_2: Space[Any]) -> bool:
    return type(space_1) is type(space_2)


def _batch_differing(differing: Sequence[Space[Any]]) -> spaces.Tuple[Any]:
    batched = spaces.Tuple([deepcopy(space) for space in differing], seed=deepcopy(differing[0].np_random))
    # Each its own seed, as `batch_space` does, or all would draw the same.
    batched.seed([int(seed) for seed in deepcopy(differing[0].np_random).integers(0, 10**8, size=len(differing))])
    return batched


@create_empty_array.register(ChatSpace)
def _no_observations(space: ChatSpace, n: int = 1, fn: Any = None) -> tuple[Observation, ...]:
    return ((),) * n


@create_empty_array.register(ToolCallSpace)
def _no_actions(space: ToolCallSpace, n: int = 1, fn: Any = None) -> tuple[AssistantMessage, ...]:
    return tuple({"role": "assistant", "content": ""} for _ in range(n))


def _unchanged(space: Space[Any], x: Any) -> Any:
    return x


def _itself(space: Space[Any]) -> Space[Any]:
    return space


for _space in (ChatSpace, ToolCallSpace):
    # Gymnasium dispatches on the type of the first space, and passes the list: no signature that a type checker accepts.
    batch_differing_spaces.register(cast("Any", _space), _batch_differing)
    flatten_space.register(_space, cast("Any", _itself))
    flatten.register(_space, _unchanged)
    unflatten.register(_space, _unchanged)
