"""Redis ACL users, one for each role: it can run its scripts and commands on its keys of one run, and nothing else.

Redis treats every key given to EVALSHA as read and written, every key given to EVALSHA_RO as read, and checks the
commands inside a script like any others. So the keys and commands of a role follow from the scripts that it runs and
the commands that its code sends itself.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from broker.connection.keys import Keys
from broker.connection.scripts import body, declared, reads_only, source

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = ("MEMORY", "XGROUP", "XINFO")
"""Commands of scripts that are granted by subcommand."""
_CONNECTION = "ping select info exists"
"""Commands of every user. EXISTS finds the run's node in a cluster. INFO is the only @dangerous one."""
_SERVICE = f"{_CONNECTION} evalsha script|load time hdel hget"
_WORKER = "xgroup|create xreadgroup xclaim xpending xinfo|groups"
_LEDGER = "evalsha_ro script|load xread xrevrange"
_LOOKER = f"{_CONNECTION} {_LEDGER} hgetall hmget zrange xrange xlen xinfo|groups scan type memory|usage"


@dataclass(frozen=True)
class AclRole:
    """Permissions of a role. scripts: those it runs. commands: those it sends itself. reads, writes: their keys.

    only, on: further commands, allowed on these keys alone.
    """

    scripts: str
    commands: str
    reads: str = ""
    writes: str = "SERVICES"
    only: str = ""
    on: str = ""


ROLES: Mapping[str, AclRole] = {
    "feeder": AclRole(
        "read_pipeline admit_tasks stage_evaluation open_evaluation drop_dead_letters heartbeat append_telemetry",
        f"{_SERVICE} {_LEDGER} getrange",
        "CHANGES RUN_CONTROL",
    ),
    "generator": AclRole(
        "publish_samples save_partials take_evaluations fail_sample return_task fail_task renew_tasks drop_dead_letters"
        " take_question answer_question note_verdict announce_peer find_peers answer_roll meet heartbeat"
        " append_telemetry add_counts keep_images register_episode reward_episode",
        f"{_SERVICE} evalsha_ro hmget hgetall xread xrange xrevrange multi exec",
        "WEIGHTS CHUNKS ORDERS RUN_CONTROL ROLL_CHANGES",
        only=_WORKER,
        on="TASKS EVAL_TASKS",
    ),
    "reward": AclRole(
        "publish_scores return_trajectory renew_trajectories dead_letter drop_dead_letters keep_eval_samples heartbeat"
        " add_counts",
        _SERVICE,
        "RUN_CONTROL",
        only=_WORKER,
        on="TRAJECTORIES",
    ),
    "trainer": AclRole(
        "take_over read_pipeline claim_scores reclaim_scores discard_scores diagnose_group close_group journal_batch"
        " complete_step commit_step forget_consumers finish_run add_version put_chunk announce_peer find_peers"
        " open_roll close_roll meet keep_samples take_eval_samples mend_evaluations drop_dead_letters set_run_control"
        " change_settings heartbeat append_telemetry add_counts",
        f"{_SERVICE} {_LEDGER} get hgetall hmget xgroup|create xinfo|groups xrange xdel",
        "ROLL_ANSWERS ROLL_CHANGES",
    ),
    "observer": AclRole("read_pipeline measure_streams", _LOOKER, "*", ""),
    "operator": AclRole(
        "read_pipeline measure_streams claim_run change_settings set_run_state set_run_control requeue_group heartbeat"
        " append_telemetry ask_policy begin_episode reward_episode",
        f"{_LOOKER} evalsha xdel hdel time",
        "*",
        "",
        "unlink",
        "*",
    ),
}
"""observer: `tidemill status` and dashboards. operator: pauses, changes settings, requeues and purges."""


def rules(role: str, keys: Keys) -> list[str]:
    """Return the rules of a user of this role, as after ``ACL SETUSER name``, without its password.

    KeyError if the role is unknown.
    """
    permissions = ROLES[role]
    scripts = permissions.scripts.split()
    written, read = set(permissions.writes.split()), set(permissions.reads.split())
    for name in scripts:
        (read if reads_only(name) else written).update(declared(name))
    # Scripts may also use the commands of a selector.
    of_scripts = {command for name in scripts for command in _commands(name)} - set(permissions.only.split())
    commands = set(permissions.commands.split()) | of_scripts
    only = " ".join([*_granted(permissions.only), *_patterns("~", permissions.on.split(), keys)])
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
    """Return access patterns with full key names; ``*`` is every key of the run."""
    return [f"{access}{key}" for key in ([f"{keys.base}:*"] if names == ["*"] else keys.named(names))]


def _commands(script: str) -> set[str]:
    calls = _CALL.findall(body(script) if reads_only(script) else source(script))
    return {f"{name}|{sub}".lower() if name in _CONTAINERS else name.lower() for name, sub in calls}


def user(role: str, keys: Keys) -> str:
    """Return a user's name, such as ``tidemill~arithmetic~trainer``; prefixes, runs and roles contain no ``~``."""
    return f"{keys.base.strip('{}').replace(':', '~')}~{role}"


def new_password() -> str:
    """Return a password of 192 random bits, safe in a URL."""
    return secrets.token_urlsafe(24)


def new_passwords() -> dict[str, str]:
    """Return a new password for every role."""
    return {role: new_password() for role in ROLES}


def acl_lines(keys: Keys, passwords: Mapping[str, str]) -> list[str]:
    """Return ``ACL SETUSER`` lines for redis-cli, one for each role in ``passwords``, with the passwords' SHA-256.

    ``acl_file_lines`` returns the same for the server's configuration.
    """
    return [f"ACL SETUSER {line}" for line in _users(keys, passwords)]


def acl_file_lines(keys: Keys, passwords: Mapping[str, str], administrator: str) -> list[str]:
    """Return ``user`` lines for a server's configuration or its aclfile, one for each role in ``passwords``.

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
