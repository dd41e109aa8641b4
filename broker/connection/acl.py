"""Redis ACL users, one a role: each can run its own scripts and commands on its own keys of one run, and nothing else.

Redis takes every key given to EVALSHA as read and written, to EVALSHA_RO as read, and checks the commands inside of
a script like any others. So keys and commands of a role follow from the scripts that it runs, and from what its
code asks directly.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from broker.connection.keys import Keys
from broker.connection.scripts import body, declared, reads_only, source

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = ("MEMORY", "XGROUP", "XINFO")
"""Commands of scripts that are granted by their subcommand."""
_CONNECTION = "ping select info exists"
"""Commands of every user. EXISTS asks a cluster for the run's node. INFO is the only @dangerous one of all."""
_SERVICE = f"{_CONNECTION} evalsha script|load time hdel hget"
_WORKER = "xgroup|create xreadgroup xclaim xpending xinfo|groups"
_LEDGER = "evalsha_ro script|load xread xrevrange"
_LOOKER = f"{_CONNECTION} {_LEDGER} hgetall hmget zrange xrange xlen xinfo|groups scan type memory|usage"


@dataclass(frozen=True)
class Role:
    """scripts: those it runs. commands: those it sends itself. reads, writes: keys these need beside the scripts'.

    only, on: commands that it may send on these keys alone.
    """

    scripts: str
    commands: str
    reads: str = ""
    writes: str = "SERVICES"
    only: str = ""
    on: str = ""


ROLES: Mapping[str, Role] = {
    "feeder": Role(
        "read_pipeline admit_tasks stage_evaluation open_evaluation drop_dead_letters heartbeat append_telemetry",
        f"{_SERVICE} {_LEDGER} getrange",
        "CHANGES RUN_CONTROL",
    ),
    "generator": Role(
        "publish_samples save_partials take_evaluations fail_sample return_task fail_task renew_tasks drop_dead_letters"
        " take_question answer_question note_verdict announce_peer find_peers answer_roll meet heartbeat"
        " append_telemetry add_counts keep_images",
        f"{_SERVICE} evalsha_ro hmget hgetall xread xrange xrevrange multi exec",
        "WEIGHTS CHUNKS ORDERS RUN_CONTROL ROLL_CHANGES",
        only=_WORKER,
        on="TASKS EVAL_TASKS",
    ),
    "reward": Role(
        "publish_scores return_trajectory renew_trajectories dead_letter drop_dead_letters keep_eval_samples heartbeat"
        " add_counts",
        _SERVICE,
        "RUN_CONTROL",
        only=_WORKER,
        on="TRAJECTORIES",
    ),
    "trainer": Role(
        "take_over read_pipeline claim_scores reclaim_scores discard_scores diagnose_group close_group journal_batch"
        " complete_step commit_step forget_consumers finish_run add_version put_chunk announce_peer find_peers"
        " open_roll close_roll meet keep_samples take_eval_samples mend_evaluations drop_dead_letters"
        " heartbeat append_telemetry add_counts",
        f"{_SERVICE} {_LEDGER} get hgetall hmget xgroup|create xinfo|groups xrange xdel",
        "ROLL_ANSWERS ROLL_CHANGES",
    ),
    "observer": Role("read_pipeline measure_streams", _LOOKER, "*", ""),
    "operator": Role(
        "read_pipeline measure_streams claim_run change_settings set_run_state set_run_control requeue_group heartbeat"
        " append_telemetry ask_policy",
        f"{_LOOKER} evalsha xdel hdel time",
        "*",
        "",
        "unlink",
        "*",
    ),
}
"""observer: `tidemill status` and dashboards. operator: whoever pauses, changes settings, requeues and purges."""


def rules(role: str, keys: Keys) -> list[str]:
    """Return the rules after ``ACL SETUSER name`` that make a user of this role, but for its password.

    KeyError for an unknown role.
    """
    found = ROLES[role]
    scripts = found.scripts.split()
    written = {key for name in scripts if not reads_only(name) for key in declared(name)} | set(found.writes.split())
    read = {key for name in scripts if reads_only(name) for key in declared(name)} | set(found.reads.split())
    # A selector allows its commands to scripts as well.
    of_scripts = {command for name in scripts for command in _commands(name)} - set(found.only.split())
    commands = set(found.commands.split()) | of_scripts
    only = " ".join([*_granted(found.only), *_patterns("~", found.on.split(), keys)])
    return [
        *("reset", "on", "resetchannels", "-@all"),
        *_granted(" ".join(commands)),
        *_patterns("~", sorted(written), keys),
        *_patterns("%R~", ["*"] if "*" in read else sorted(read - written), keys),
        *(f"({only})".split() if only else []),
    ]


def _granted(commands: str) -> list[str]:
    return [f"+{command}" for command in sorted(commands.split())]


def _patterns(access: str, names: list[str], keys: Keys) -> list[str]:
    """Whole names of keys; ``*`` is every key of the run."""
    return [f"{access}{key}" for key in ([f"{keys.base}:*"] if names == ["*"] else keys.named(names))]


def _commands(script: str) -> set[str]:
    calls = _CALL.findall(body(script) if reads_only(script) else source(script))
    return {f"{name}|{sub}".lower() if name in _CONTAINERS else name.lower() for name, sub in calls}


def user(role: str, keys: Keys) -> str:
    """``tidemill~arithmetic~trainer``: a user is of one run. No prefix, no run and no role has a ``~``."""
    return f"{keys.base.strip('{}').replace(':', '~')}~{role}"


def new_password() -> str:
    """Return a password of 192 random bits, safe in a URL."""
    return secrets.token_urlsafe(24)


def new_passwords() -> dict[str, str]:
    """Return a new password for every role."""
    return {role: new_password() for role in ROLES}


def acl_lines(keys: Keys, passwords: Mapping[str, str]) -> list[str]:
    """``ACL SETUSER`` lines for redis-cli, one for every role in ``passwords``; they hold only the passwords' SHA-256.

    ``acl_file_lines`` are the same for the server's configuration.
    """
    return [f"ACL SETUSER {line}" for line in _users(keys, passwords)]


def acl_file_lines(keys: Keys, passwords: Mapping[str, str], administrator: str) -> list[str]:
    """Return ``user`` lines for a server's configuration or its aclfile: a user for every role in ``passwords``.

    administrator: password of ``default``, which may do everything.
    """
    everything = f"default on ~* &* +@all #{_sha256(administrator)}"
    return [f"user {line}" for line in (everything, *_users(keys, passwords))]


def _users(keys: Keys, passwords: Mapping[str, str]) -> list[str]:
    return [
        " ".join([user(role, keys), *rules(role, keys), f"#{_sha256(password)}"])
        for role, password in passwords.items()
    ]


def _sha256(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
