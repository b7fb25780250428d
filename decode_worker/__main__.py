"""`python -m twinpool.decode_worker`: one COMPLETION process."""

from ..cluster.role import parse_role_arguments, run_role
from ..engine.loading import load
from .worker import CompletionWorker


def main() -> int:
    arguments = parse_role_arguments("decode_worker")
    spec = arguments.spec
    return CompletionWorker(arguments, load(spec.completion.engine, arguments.model_folder, spec.model_name)).run()


if __name__ == "__main__":
    run_role(main)
