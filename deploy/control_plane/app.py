"""The control plane's application: routes, their OpenAPI document, and the pages at / and /docs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan

from deploy.control_plane.files.archive import Archive
from deploy.control_plane.files.run_folder import RunFolder
from deploy.control_plane.routes import control, dead_letters, episodes, playground, reads, runs, trajectories
from deploy.control_plane.routes.context import Context, InContext
from deploy.control_plane.status.prometheus import CONTENT_TYPE
from deploy.control_plane.web import problems
from deploy.control_plane.web.idempotency import HEADER, Idempotency
from deploy.control_plane.web.problems import KINDS, MEDIA_TYPE
from deploy.control_plane.web.refusal import Refusal
from deploy.control_plane.web.security import CHANGES, PROBES, RequestGuard, is_conversation
from schemas.control_api.base import Health, Problem

PAGE = Path(__file__).parent / "dashboard"
VIEWER = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
LOOP_S = 30.0
"""A reading thread that has not come round for so long is stuck."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OF_EVERY_ROUTE = (401, 403, 413, 429, 503)


def make_app(
    context: Context, token: str | None = None, hosts: frozenset[str] = LOOPBACK_NAMES, read_token: str | None = None
) -> Any:
    """Return the ASGI application. token: required of every request but probes and the page; None only on loopback.

    hosts: names under which requests without a token may address it. read_token: allows reading, but no orders.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        poller = context.poller
        poller.on_status, poller.on_metrics, poller.on_events = context.hub.bind(asyncio.get_running_loop())
        poller.start()
        yield
        context.hub.close()
        poller.stop()

    app = _new_app("Tidemill control plane", "Status of a Tidemill run, and orders to it.", life)
    app.state.context = context
    app.state.archive = Archive(watched=RunFolder(context.plan.folder, context.plan.run))
    for rooms in (reads, trajectories, control, dead_letters, playground, episodes, runs):
        app.include_router(rooms.router)
    app.include_router(probes)
    pages(app)

    def public(path: str) -> bool:
        return is_public(path) or (bool(context.plan.live.tenants) and path.startswith(episodes.router.prefix))

    return RequestGuard(Idempotency(app), token, hosts, public, read_token)


def make_files_app(
    folder: Path, token: str | None = None, hosts: frozenset[str] = LOOPBACK_NAMES, read_token: str | None = None
) -> Any:
    """Return the ASGI application without a broker, over the runs in ``folder``. It takes no orders."""
    app = _new_app("Tidemill runs", "Runs as their folders show them.")
    app.state.archive = Archive(folder)
    app.include_router(runs.router)
    pages(app)
    return RequestGuard(app, token, hosts, is_public, read_token)


def _new_app(title: str, description: str, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Return an application with our form of errors, and without FastAPI's own pages."""
    app = FastAPI(
        title=title,
        version=version("tidemill"),
        description=f"{description} Errors are RFC 9457 problems.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        # Generated clients call a route like its function.
        generate_unique_id_function=lambda route: route.name,
    )
    problems.install(app)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


def is_public(path: str) -> bool:
    """Return whether a path needs no token: probes, the pages, which hold no data, and unguessable addresses."""
    return path in PROBES or is_conversation(path) or not path.startswith(("/v1", "/metrics", "/openapi"))


def pages(app: FastAPI) -> None:
    """The dashboard, and the API's description to read and try. All that they load is in this package."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(PAGE / "docs.html")

    @app.get("/assets/vendor/swagger-ui/{name}", include_in_schema=False)
    async def viewer(name: str) -> Response:
        kind = VIEWER.get(name)
        if kind is None:
            raise Refusal(404, f"no file {name!r} of Swagger UI")
        # Every browser takes it packed, and the repository holds a third of the bytes.
        return FileResponse(
            PAGE / "vendor" / "swagger-ui" / f"{name}.gz", media_type=kind, headers={"Content-Encoding": "gzip"}
        )

    app.mount("/assets", StaticFiles(directory=PAGE), name="assets")


probes = APIRouter(tags=["probes"])


@probes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(context: InContext) -> Response:
    """Return the run's metrics in Prometheus' text format."""
    return Response(context.poller.metrics(), media_type=CONTENT_TYPE)


@probes.get("/livez")
async def livez(context: InContext) -> Health:
    """Return whether the process does its work: only its own loop counts."""
    silent = time.monotonic() - context.poller.ticked
    if silent > LOOP_S:
        raise Refusal(503, f"the reading thread has been stuck for {silent:.0f} s")
    return Health(ok=True, text="alive")


@probes.get("/readyz")
async def readyz(context: InContext) -> Health:
    """Return whether the broker answers."""
    if context.poller.error:
        raise Refusal(503, f"not ready: {context.poller.error}")
    return Health(ok=True, text="ready")


@probes.get("/startupz")
async def startupz(context: InContext) -> Health:
    """Return whether the broker has answered once."""
    if not context.poller.started:
        raise Refusal(503, f"starting: {context.poller.error}")
    return Health(ok=True, text="started")


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with problems as they are really answered."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        parts = schema.setdefault("components", {})
        models = parts.setdefault("schemas", {})
        models.pop("HTTPValidationError", None)
        models.pop("ValidationError", None)
        models["Problem"] = Problem.model_json_schema()
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, item in schema["paths"].items():
            for method, operation in item.items():
                changes = method.upper() in CHANGES
                _describe(path, operation, changes)
                if changes:
                    operation.setdefault("parameters", []).append(IDEMPOTENCY)
        app.openapi_schema = schema
    return app.openapi_schema


IDEMPOTENCY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "A value of your own. Asked again with it, the first answer is repeated and nothing is done twice.",
}


def _describe(path: str, operation: dict[str, Any], changes: bool) -> None:
    operation["summary"] = operation.get("description", path).partition("\n")[0].partition(". ")[0].rstrip(".")
    answers = operation["responses"]
    statuses = {503} if path in PROBES else set(OF_EVERY_ROUTE)
    if answers.pop("422", None) is not None:
        statuses |= {400, 422}
    if "{" in path:
        statuses.add(404)
    if changes:
        statuses |= {409, 422}  # Of a wrong idempotency key, or one whose request is still under way.
    for status in sorted(statuses):
        answers[str(status)] = {
            "description": KINDS[status].replace("-", " "),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    if path not in PROBES:
        operation["security"] = [{}, {"token": []}]
