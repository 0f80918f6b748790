"""``inspect sandbox cleanup docker_pool``: removes containers of dead owners, or a named one."""

from __future__ import annotations

from inspect_tinker_plugin.docker_pool.engine import Engine, quietly, typed
from inspect_tinker_plugin.docker_pool.lease import KIND, OWNER, PROVIDER, reap, remove_owned


def cleanup(engine: Engine, id: str | None) -> int:
    """Remove containers, in this thread.

    Args:
        engine: the engine to look at.
        id: a container's id (or its start) or name, or the id of an owner, all of whose
            containers are removed even while it lives; ``None`` takes those of dead owners.

    Returns:
        How many containers were removed.

    Raises:
        SandboxEngineError: the engine does not answer.
    """
    try:
        if id is None:
            return reap(engine)
        api = engine.api
        filters = {"label": f"{KIND}={PROVIDER}"}
        for container in api.containers(all=True, filters=filters):
            names = [name.lstrip("/") for name in container["Names"] or []]
            if id in names or container["Id"].startswith(id):
                return int(quietly(api.remove_container, container["Id"], force=True, v=True))
            if (container["Labels"] or {}).get(OWNER) == id:
                return remove_owned(engine, id)
    except Exception as ex:
        raise typed(ex, "cleanup") from ex
    return 0
