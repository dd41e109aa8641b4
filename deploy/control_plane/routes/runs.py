"""Routes that read runs from their folders: the same under a control plane and in ``tidemill ui``, without a broker."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from deploy.control_plane.files.archive import Archive
from deploy.control_plane.files.evaluations import PromptSort, read_evaluations, read_prompts
from deploy.control_plane.files.groups import Sort, Wanted
from deploy.control_plane.files.images import ANSWER, Digest, image_answer
from deploy.control_plane.files.logs import PART, list_logs, read_log
from deploy.control_plane.files.resources import read_alerts
from deploy.control_plane.files.run_folder import RunFolder
from deploy.control_plane.files.tar import tar_members, tar_size, tar_stream
from deploy.control_plane.routes.context import Context
from deploy.control_plane.routes.paging import Cursor, Few, page_of
from deploy.control_plane.web.paging import MOST, Page, cut
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.run_folders import (
    Alerts,
    Checkpoints,
    EvaluationPrompts,
    GroupDetail,
    Groups,
    LogPart,
    Logs,
    Resources,
    RunEvaluations,
    RunMetrics,
    Runs,
    RunSettings,
    RunSummary,
)

router = APIRouter(prefix="/v1/runs", tags=["runs"])


def folder_of(
    request: Request, run: Annotated[str, Path(max_length=255, description="Name of the run, from the list.")]
) -> RunFolder:
    """Return the folder of a run that this server shows."""
    archive: Archive = request.app.state.archive
    return archive.find(run)


InRun = Annotated[RunFolder, Depends(folder_of)]
Number = Annotated[int, Path(ge=0, le=MOST)]
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
Text = Annotated[str | None, Query(max_length=200, description="In the prompt or a completion, whatever its case.")]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("")
def list_runs(request: Request, page: Few) -> Runs:
    """Return the runs that this server shows, running and finished, by name."""
    found: Runs = request.app.state.archive.runs(page)
    context = getattr(request.app.state, "context", None)
    if not isinstance(context, Context):
        return found
    return found.model_copy(update={"playground": context.plan.playground, "chat": context.plan.chat})


@router.get("/{run}")
def show_run(folder: InRun) -> RunSummary:
    """Return where a run stands, and the summary of one that has ended."""
    head = folder.head()
    if head is None:
        raise Refusal(404, f"run {folder.name!r} has left nothing in {folder.path} yet")
    return RunSummary(run=head, summary=folder.summary)


@router.get("/{run}/config")
def show_config(folder: InRun) -> RunSettings:
    """Return the configuration in effect, secrets masked; versions, machine and git commit."""
    return folder.config()


@router.get("/{run}/metrics")
def read_metrics(
    folder: InRun,
    page: Annotated[Page, page_of(1000, 10_000)],
    name: Annotated[list[str] | None, Query(description="Only these series; repeat it for more.")] = None,
) -> RunMetrics:
    """Return the metrics of a run's steps as columns, in which steps always rise, with what each is.

    A cursor is the number of a step.
    """
    with folder.lock:
        return folder.metrics(page.number(), page.limit, set(name) if name is not None else None, page.newest)


@router.get("/{run}/groups")
def list_groups(
    folder: InRun,
    step_from: Annotated[int | None, Query(ge=0, le=MOST)] = None,
    step_to: Annotated[int | None, Query(ge=0, le=MOST)] = None,
    task_id: Annotated[int | None, Query(ge=0, le=MOST)] = None,
    mean_from: Finite = None,
    mean_to: Finite = None,
    text: Text = None,
    sort: Sort = "oldest",
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Groups:
    """Return the prompt groups that are kept of a run's steps: search them, and sort by reward, spread or length."""
    wanted = Wanted(step_from, step_to, task_id, mean_from, mean_to, text)
    with folder.lock:
        return folder.groups.list(wanted, sort, Page(limit, cursor))


@router.get("/{run}/groups/{step}/{task_id}")
def show_group(folder: InRun, step: Number, task_id: Number) -> GroupDetail:
    """Return a prompt group with all of its samples: texts, rewards by term, advantages."""
    with folder.lock:
        found = folder.groups.get(step, task_id)
    if found is None:
        raise Refusal(404, f"the group of task {task_id} in step {step} is not kept: trainer.log_groups says how many")
    return found


@router.get("/{run}/images/{digest}", response_class=Response, responses=ANSWER)
def show_image(folder: InRun, digest: Digest) -> Response:
    """Return an image that the policy was shown in a sample that is kept, as the model reads it."""
    return image_answer(digest, folder.path)


@router.get("/{run}/evaluations")
def list_evaluations(folder: InRun, page: Few) -> RunEvaluations:
    """Return the complete evaluations of a run on held-out prompts, by version."""
    shown, following = cut(read_evaluations(folder.path), lambda one: (one.version, ""), page)
    return RunEvaluations(evaluations=shown, next=following)


@router.get("/{run}/evaluations/{version}")
def show_evaluation(
    folder: InRun,
    version: Number,
    sort: PromptSort = "worst",
    text: Text = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> EvaluationPrompts:
    """Return the prompts of an evaluation with their samples, the worst first."""
    found = read_prompts(folder.path, version, sort, text, Page(limit, cursor))
    if found is None:
        raise Refusal(404, f"no samples of the evaluation of version {version} are kept")
    return found


@router.get("/{run}/logs")
def list_service_logs(folder: InRun, page: Few) -> Logs:
    """Return the logs of a run's services on this machine, by name."""
    shown, following = cut(list_logs(folder.path), lambda one: (0, one.service), page)
    return Logs(logs=shown, next=following)


@router.get("/{run}/logs/{service}")
def read_service_log(
    folder: InRun,
    service: Annotated[str, Path(max_length=255, description="From the list.")],
    after: Annotated[int | None, Query(ge=0, le=MOST, description="Only what follows this byte; else the end.")] = None,
    most: Annotated[int, Query(ge=1024, le=PART, description="At most so many bytes.")] = 65536,
) -> LogPart:
    """Return lines of a service's log: the last ones, or those that follow, to watch it grow."""
    found = read_log(folder.path, service, after, most)
    if found is None:
        raise Refusal(404, f"no log of a service {service!r} in the run's folder")
    return found


@router.get("/{run}/checkpoints")
def list_checkpoints(folder: InRun, page: Few) -> Checkpoints:
    """Return the checkpoints in the run's folder, by step."""
    shown, following = cut(folder.checkpoints(), lambda one: (one.step, one.name), page)
    return Checkpoints(checkpoints=shown, next=following)


@router.get(
    "/{run}/checkpoints/{checkpoint}",
    response_class=StreamingResponse,
    responses={200: {"description": "The checkpoint's folder as a tar archive.", "content": {"application/x-tar": {}}}},
)
def download_checkpoint(
    folder: InRun, checkpoint: Annotated[str, Path(pattern=r"^step-[0-9]{8,}-t[0-9]{4,}$")]
) -> StreamingResponse:
    """Return a checkpoint whole, as a tar archive."""
    known = {one.name for one in folder.checkpoints()}
    path = folder.path / "checkpoints" / checkpoint
    try:
        files = tar_members(path) if checkpoint in known else None
    except FileNotFoundError:
        # Its trainer, which keeps the newest, deletes it now.
        files = None
    if files is None:
        raise Refusal(404, f"no checkpoint {checkpoint!r} in the run's folder")
    headers = {
        "Content-Length": str(tar_size(files)),
        "Content-Disposition": f'attachment; filename="{checkpoint}.tar"',
    }
    return StreamingResponse(tar_stream(path, files), media_type="application/x-tar", headers=headers)


@router.get("/{run}/resources")
def read_resources(
    folder: InRun,
    after: Annotated[float, Query(ge=0, allow_inf_nan=False, description="Only later than this Unix time.")] = 0,
    points: Annotated[int, Query(ge=2, le=5000, description="At most so many moments; of more, one in so many.")] = 500,
) -> Resources:
    """Return use of processors, memory and GPU memory by service, and the length of the queues, over time."""
    with folder.lock:
        return folder.resources.read(after, points)


@router.get("/{run}/alerts")
def list_alerts(folder: InRun, page: Few) -> Alerts:
    """Return the alerts that fired, by when they did."""
    shown, following = cut(read_alerts(folder.path), lambda one: (one.fired, one.name), page)
    return Alerts(alerts=shown, next=following)
