"""An Inspect task as a verifiers taskset, with the harness and the environment that run it."""

from inspect_tinker_plugin.serve.verifiers import as_verifiers_taskset

# Keywords are the options of `as_rl_dataset`: reward=..., message_limit=..., task_args={...}.
NewnameTaskset, NewnameHarness, NewnameEnv = as_verifiers_taskset("newname_tasks/stock")

__all__ = ["NewnameEnv", "NewnameHarness", "NewnameTaskset"]
