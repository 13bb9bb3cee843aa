"""`engine-serve` and `python -m trunkline`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import sys
from collections.abc import Sequence

from setproctitle import setproctitle

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.client import EngineDied
from trunkline.engine.config import settings_line
from trunkline.engine.validation import RequestError
from trunkline.server import logs
from trunkline.server.arguments import UsageError, parse_arguments, without_secrets
from trunkline.server.combinations import without_effect
from trunkline.server.config import ServerConfig

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as the command line says, until a signal.

    Returns:
        The exit code: 0 after a signal, 1 when the start failed, 2 for an unusable command line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        # Whoever lists the machine's processes sees their command lines, keys and all.
        setproctitle(" ".join(["engine-serve", *without_secrets(arguments)]))
    try:
        config, warnings = parse_arguments(arguments)
    except UsageError as error:
        print(f"engine-serve: {error}\n(engine-serve --help lists the flags)", file=sys.stderr)
        return USAGE_ERROR
    config = with_random_seed(config)
    logs.configure(
        config.engine.log_level,
        config.logs.log_level_http,
        config.logs.access_log_exclude_prefixes,
    )
    logger = logging.getLogger(__name__)
    for warning in (*warnings, *without_effect(config)):
        logger.warning("%s", warning)
    logger.info("%s", settings_line(config))
    from trunkline.server.serve import (
        StartupError,
        loop_factory,
        run,
    )  # slow to import: not for --help

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(config))
    except (StartupError, CheckpointError, EngineDied, RequestError) as error:
        logger.error("engine-serve: %s", error)
        return 1
    return 0


def with_random_seed(config: ServerConfig) -> ServerConfig:
    """The same configuration with a random seed chosen if none was given."""
    scheduler = config.engine.scheduler
    if scheduler.random_seed is not None:
        return config
    scheduler = dataclasses.replace(scheduler, random_seed=random.getrandbits(30))
    engine = dataclasses.replace(config.engine, scheduler=scheduler)
    return dataclasses.replace(config, engine=engine)


if __name__ == "__main__":
    sys.exit(main())
