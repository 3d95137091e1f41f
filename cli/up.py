"""`baton up`: the whole local stack in the background, ready when the command returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cli import stack
from cli.errors import CommandError
from cli.plan import Plan, StackOptions, make_plan
from cli.probes import check_redis_url
from cli.processes import ProcessRecord, start_ticks
from cli.run_folder import MARKERS, Entry, RunFolder
from cli.terminal import say


def up(
    run: RunFolder, options: StackOptions, model: Path | None, *, restart: bool, timeout_s: float
) -> list[Entry]:
    """Starts a stack.

    Args:
        model: a Hugging Face folder; None takes the engine's default model, fetched if needed.

    Raises:
        CommandError: a stack runs already, a port is taken, or a process did not get ready.
    """
    from cli.unknown_settings import unknown_settings

    environment = dict(os.environ)
    with run.locked():
        if alive := stack.running(run):
            names = ", ".join(entry.name for entry in alive)
            raise CommandError(f"a stack is running here already ({names}); stop it with `baton down`")
        stack.end(run, environment, lambda name, what: None)  # clears the records of a crashed one
        folder = _model_folder(options.engine, model)
        plan = make_plan(options, folder, environment)
        if environment.get("BATON_REDIS_URL") and (
            trouble := check_redis_url(environment["BATON_REDIS_URL"])
        ):
            raise CommandError(f"BATON_REDIS_URL does not answer: {trouble}")
        for notice in (*plan.notices, *unknown_settings(environment)):
            say(notice)
        entries = stack.start(run, plan, environment, timeout_s, _show)
        if restart:
            _start_supervisor(run, plan)
    say(f"ready: {gateway_url(entries)} (chat page), stop with `baton down`, logs in {run.path}")
    return entries


def gateway_url(entries: list[Entry]) -> str:
    """Base URL of the first gateway."""
    return next(f"http://{entry.address}" for entry in entries if entry.role == "gateway")


def running_url(run: RunFolder) -> str:
    """Base URL of the first living gateway of the stack here. Raises CommandError without one."""
    alive = [entry for entry in stack.running(run) if entry.role == "gateway" and entry.address]
    if not alive:
        raise CommandError(
            f"no gateway runs in {run.parent}: start a stack there with `baton up`, or give --url"
        )
    return gateway_url(alive)


def _show(name: str, what: str) -> None:
    say(f"  {name:<12} {what}")


def _model_folder(engine: str, model: Path | None) -> Path:
    from cli.model import ensure_default_model, ensure_sim_model

    if model is None:
        return ensure_sim_model() if engine == "sim" else ensure_default_model()
    if not (model / "config.json").is_file():
        raise CommandError(f"--model or BATON_MODEL: {model} is not a model folder (no config.json)")
    return model.resolve()


def _start_supervisor(run: RunFolder, plan: Plan) -> None:
    """Hands the plan over through a pipe: it holds the environment's secrets and belongs in no file."""
    with run.log_path("supervisor-0").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", MARKERS["supervisor"]],
            cwd=run.parent,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    record = ProcessRecord(process.pid, MARKERS["supervisor"], start_ticks(process.pid), run.parent)
    stack.record_supervisor(run, record)
    assert process.stdin is not None
    process.stdin.write(json.dumps([planned.to_json() for planned in plan.launches]).encode())
    process.stdin.close()
    process.returncode = 0  # it outlives this command
