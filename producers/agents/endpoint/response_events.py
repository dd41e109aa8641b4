"""A finished response as the events that a stream of OpenAI's Responses protocol has, in their order."""

from __future__ import annotations

from producers.agents.endpoint.protocols import JSON


def events_of(response: JSON) -> list[JSON]:
    """All events; the last is ``response.completed``, or ``response.incomplete`` where the answer was cut."""
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[JSON] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(response["output"]):
        events += [event | {"output_index": index} for event in _item_events(item)]
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return events


def _item_events(item: JSON) -> list[JSON]:
    if item["type"] == "function_call":
        empty: JSON = {"arguments": "", "status": "in_progress"}
        inner = _arguments_events(item)
    else:
        empty = {"content": [], "status": "in_progress"}
        inner = [event for at, part in enumerate(item["content"]) for event in _part_events(item["id"], at, part)]
    return [
        {"type": "response.output_item.added", "item": item | empty},
        *inner,
        {"type": "response.output_item.done", "item": item},
    ]


def _arguments_events(item: JSON) -> list[JSON]:
    text, base = item["arguments"], {"item_id": item["id"]}
    name = "response.function_call_arguments"
    return [
        {"type": f"{name}.delta", "delta": text, **base},
        {"type": f"{name}.done", "arguments": text, "name": item["name"], **base},
    ]


def _part_events(item: str, index: int, part: JSON) -> list[JSON]:
    """The events of one text, of a message or of the reasoning."""
    base: JSON = {"item_id": item, "content_index": index}
    extra: JSON = {"logprobs": []} if part["type"] == "output_text" else {}
    name = f"response.{part['type']}"
    return [
        {"type": "response.content_part.added", "part": part | {"text": ""}, **base},
        {"type": f"{name}.delta", "delta": part["text"], **extra, **base},
        {"type": f"{name}.done", "text": part["text"], **extra, **base},
        {"type": "response.content_part.done", "part": part, **base},
    ]
