"""What all answers of the stand-in for vLLM have in common: pace, streams, clients that leave, and what a message shows of its tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

from mock_vllm import Fault, MockVLLM, Sampled
from starlette.responses import Response


class Stream(Response):
    """Streams events; a client that leaves is counted."""

    def __init__(self, mock: MockVLLM, events: AsyncIterator[str], fault: Fault | None) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.mock, self.events, self.fault = mock, events, fault

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sent = 0
            async for event in self.events:
                if self.fault is not None and sent >= self.fault.after_chunks:
                    raise RuntimeError("the connection is broken off")
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                sent += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await cancelled_with_the_client(self.mock, run(), receive)


async def cancelled_with_the_client(mock: MockVLLM, work: Any, receive: Any) -> Any:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, listener = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    mock.running += 1
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            mock.cancelled += 1
            task.cancel()
            return None
        return task.result()
    finally:
        mock.running -= 1
        listener.cancel()


async def paced(mock: MockVLLM, count: int) -> AsyncIterator[int]:
    for index in range(count):
        if mock.hold_after == index:
            await mock.go.wait()
        if mock.token_seconds:
            await asyncio.sleep(mock.token_seconds)
        yield index


def calls_of(one: Sampled) -> list[dict[str, Any]]:
    if not one.whole:
        return []
    return [
        {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in one.said.calls
    ]


def content_of(one: Sampled) -> str | None:
    text = one.text
    if one.said.reasoning and "</think>" in text:
        text = text.split("</think>", 1)[1]
    return (text.split("<tool_call>")[0] or None) if calls_of(one) else text
