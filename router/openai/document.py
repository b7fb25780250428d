"""GET /openapi.json: what the endpoint takes and answers, built from the very models that check the bodies.

A body that fits its schema may still be a 400: some fields do not go together, and ids depend on the model.
"""

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from .requests import ChatBody, CompletionBody
from .tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

Json = dict[str, Any]

BODIES = (CompletionBody, ChatBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
STATUSES = {
    400: "The request is wrong, or asks for what is not served.",
    401: "An API key is needed, or this one is not known.",
    404: "There is no such model here.",
    405: "This path does not take that method.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON by its Content-Type.",
    429: "This API key's quota is used up.",
    431: "The headers are too large.",
    500: "A fault of the router.",
    502: "Workers failed on this request, each time that it was tried.",
    503: "No worker is ready, the queue is full, or the router is shutting down.",
    504: "The request was not done in time.",
}
ALWAYS = (400, 401, 405, 408, 431, 500)
OF_BODIES = (*ALWAYS, 404, 413, 415, 503)
OF_GENERATION = (*OF_BODIES, 429, 502, 504)
RETRYABLE = (429, 503)

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
NULL: Json = {"type": "null"}
ANYTHING: Json = {}


def _object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, NULL]}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR = _object({"error": _object({"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)})})
USAGE = _object(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {"prompt_tokens_details": _object({"cached_tokens": COUNT})},
)
MESSAGE = _object(
    {"role": _one_of("assistant"), "content": _or_null(TEXT)},
    {"refusal": NULL, "tool_calls": _list({"type": "object"})},
)
IN_CHOICES: Json = {"logprobs": _or_null({"type": "object"}), "token_ids": _list(COUNT)}
# One server-sent event, after whatever fields it has; its data is a chunk in JSON, or [DONE].
EVENT: Json = {"type": "object", "properties": {"data": TEXT}, "required": ["data"]}
MODEL = _object(
    {"id": TEXT, "object": _one_of("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": _or_null(COUNT)}
)


def _answer(kind: str, choice: Json, reasons: tuple[str, ...]) -> Json:
    choices = _list(_object({"index": COUNT, **choice, "finish_reason": _one_of(*reasons)}, IN_CHOICES))
    head = {"id": TEXT, "object": _one_of(kind), "created": COUNT, "model": TEXT}
    return _object({**head, "choices": choices, "usage": _ref("Usage")}, {"timing": _or_null({"type": "object"})})


SCHEMAS: Json = {
    "Error": ERROR,
    "Usage": USAGE,
    "Model": MODEL,
    "Models": _object({"object": _one_of("list"), "data": _list(_ref("Model"))}),
    "Completion": _answer("text_completion", {"text": TEXT}, ("stop", "length")),
    "ChatCompletion": _answer("chat.completion", {"message": MESSAGE}, ("stop", "length", "tool_calls")),
    "Tokens": _object({"count": COUNT, "max_model_len": _or_null(COUNT), "tokens": _list(COUNT)}),
    "Text": _object({"prompt": TEXT}),
    "Status": _object({"status": TEXT}),
    "Cluster": _object({"model": TEXT, "state": _one_of("ready", "not_ready", "draining"), "pools": _list(ANYTHING)}),
}
EXAMPLES: Json = {
    "CompletionBody": {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 5},
    "ChatBody": {"model": "smollm2", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 20},
    "TokenizeTextBody": {"prompt": "Hi!"},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
}


def openapi_document(model_name: str, version: str, has_keys: bool) -> Json:
    """Return the whole document. With keys, every path but the liveness check asks for one."""
    _, found = models_json_schema(
        [(kind, "validation") for kind in BODIES], ref_template="#/components/schemas/{model}"
    )
    schemas = SCHEMAS | found["$defs"]
    schemas["Message"] |= {"required": ["role"], "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}]}
    for kind in BODIES:
        schemas[kind.__name__]["properties"]["model"]["enum"] = [model_name, None]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Twinpool",
            "version": version,
            "description": f"OpenAI-compatible endpoint for {model_name}. In a body, null is the same as leaving out.",
        },
        "security": [{"key": []}, {"password": []}] if has_keys else [],
        "paths": _paths(model_name),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic", "description": "any name; the key as password"},
            },
        },
    }


def _paths(model_name: str) -> Json:
    stream = {"text/event-stream": {"schema": EVENT}}
    status = {"application/json": {"schema": _ref("Status")}}
    page = {"get": _operation("The page: the cluster, and a chat with it", _content("text/html"), ALWAYS)}
    metrics = _content("text/plain")
    model = {"name": "model", "in": "path", "required": True, "schema": _one_of(model_name)}
    return {
        "/v1/completions": _post("CompletionBody", _json("Completion") | stream, OF_GENERATION),
        "/v1/chat/completions": _post("ChatBody", _json("ChatCompletion") | stream, OF_GENERATION),
        "/tokenize": _post(("TokenizeTextBody", "TokenizeChatBody"), _json("Tokens"), OF_BODIES),
        "/detokenize": _post("DetokenizeBody", _json("Text"), OF_BODIES),
        "/v1/models": {"get": _operation("The one model", _json("Models"), ALWAYS)},
        "/v1/models/{model}": {
            "get": _operation("A model", _json("Model"), (*ALWAYS, 404)) | {"parameters": [model]},
        },
        "/health": _health("Whether requests are served", status, (*ALWAYS, 503)),
        "/health/ready": _health("Whether requests are served", status, (*ALWAYS, 503)),
        "/health/live": _health("Whether the router runs; needs no key", status, ALWAYS, security=[]),
        "/metrics": _health("For Prometheus", metrics, ALWAYS),
        "/cluster": {"get": _operation("The pools and their workers", _json("Cluster"), ALWAYS)},
        "/openapi.json": {"get": _operation("This document", {"application/json": {"schema": ANYTHING}}, ALWAYS)},
        "/": page,
    }


def _post(bodies: str | tuple[str, ...], answers: Json, statuses: Iterable[int]) -> Json:
    names = (bodies,) if isinstance(bodies, str) else bodies
    schema = _ref(names[0]) if len(names) == 1 else {"anyOf": [_ref(name) for name in names]}
    media: Json = {"schema": schema, "example": EXAMPLES[names[0]]}
    request = {"required": True, "content": {"application/json": media}}
    summary = names[0].removesuffix("Body")
    return {"post": _operation(summary, answers, statuses) | {"requestBody": request}}


def _health(summary: str, answers: Json, statuses: Iterable[int], **more: Any) -> Json:
    statuses = tuple(statuses)
    head = _operation(summary, answers, statuses) | more
    head["responses"] = {status: {"description": r["description"]} for status, r in head["responses"].items()}
    return {"get": _operation(summary, answers, statuses) | more, "head": head}


def _operation(summary: str, answers: Json, statuses: Iterable[int]) -> Json:
    errors = {str(status): _error(status) for status in sorted(statuses)}
    return {"summary": summary, "responses": {"200": {"description": "Done.", "content": answers}} | errors}


def _error(status: int) -> Json:
    answer: Json = {"description": STATUSES[status], "content": _json("Error")}
    if status in RETRYABLE:
        answer["headers"] = {"Retry-After": {"description": "seconds", "schema": COUNT, "required": True}}
    return answer


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}


def _content(media_type: str) -> Json:
    return {media_type: {"schema": TEXT}}
