"""`python -m twinpool.prefill_worker`: one PROMPT process."""

from ..cluster.role import parse_role_arguments, run_role
from ..engine.loading import load
from .worker import PromptWorker


def main() -> int:
    arguments = parse_role_arguments("prefill_worker")
    spec = arguments.spec
    return PromptWorker(arguments, load(spec.prompt.engine, arguments.model_folder, spec.model_name)).run()


if __name__ == "__main__":
    run_role(main)
