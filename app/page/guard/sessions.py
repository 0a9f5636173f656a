"""Bounds what Gradio keeps of each visitor, and releases it when the visitor leaves.

Replaces parts of Gradio that are not public; `tests/app/page/guard/test_served.py` notices when they change."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.state_holder import SessionState, StateHolder
from gradio.utils import LRUCache

from outrider.app.page.guard.limits import SESSIONS


class _Session(SessionState):  # type: ignore[misc]
    def _update_value_in_config(self, key: int, value: Any) -> None:
        """Keep nothing. Gradio keeps every value that it has sent, for its deep links, which this page doesn't have."""


class _Sessions(StateHolder):  # type: ignore[misc]
    def __getitem__(self, session_id: str) -> SessionState:
        if session_id not in self.session_data:
            self.session_data[session_id] = _Session(self.blocks)
        return super().__getitem__(session_id)


class _Messages(LRUCache):  # type: ignore[misc]
    """The messages that wait for each session, and with them the ids of its events."""

    def __init__(self, events: dict[str, set[str]]) -> None:
        super().__init__(SESSIONS)
        self._events = events

    def __delitem__(self, session: str) -> None:  # the client closed the connection
        super().__delitem__(session)
        self._events.pop(session, None)

    def popitem(self, last: bool = True) -> Any:
        session, messages = super().popitem(last)
        self._events.pop(session, None)
        return session, messages


def bound_sessions(page: gr.Blocks, app: Any) -> None:
    """Keep the state of at most SESSIONS visitors. Call it before the first request."""
    sessions = _Sessions()
    sessions.set_blocks(page)
    sessions.capacity = SESSIONS
    app.state_holder = sessions
    queue = page._queue
    queue.pending_messages_per_session = _Messages(queue.pending_event_ids_session)
    queue.ANALYTICS_MAX_EVENTS = 0  # of Gradio's monitoring page, which is off
    queue.compute_analytics_summary = lambda records: {}


def forget(page: gr.Blocks, session: str) -> None:
    """Release what is kept of a visitor who left."""
    page.state_holder.session_data.pop(session, None)
    page.state_holder.time_last_used.pop(session, None)


def abandoned(page: gr.Blocks, session: str) -> bool:
    """Whether the visitor closed the connection on which the results of a running event were expected."""
    jobs = [event for events in page._queue.active_jobs for event in events or ()]
    closed = session not in page._queue.pending_messages_per_session
    return closed or any(event.session_hash == session and not event.alive for event in jobs)


def waiting_runs(page: gr.Blocks) -> int:
    """How many runs wait in the queue."""
    return len(page._queue)
