"""The sandbox ``docker_pool``: hardened containers that are started before they are needed."""
