"""`baton down`: ends what `baton up` started in this folder, and nothing else."""

import os

from cli import stack
from cli.run_folder import RunFolder
from cli.terminal import say


def down(run: RunFolder) -> None:
    """Also after a crash, and with nothing to stop: whatever still lives is ended, dead records go.

    Raises:
        CommandError: a process survives SIGKILL.
    """
    if not run.path.is_dir():
        say("nothing to stop here")
        return
    with run.locked():
        num_ended = stack.end(run, os.environ, lambda name, what: say(f"  {name:<12} {what}"))
    say(f"stopped {num_ended} processes" if num_ended else "nothing to stop here")
