# Any role of Twinpool on a CPU. No model inside: mount one, or a cache volume, at /var/cache/twinpool.
#
#   docker build -t twinpool .
#   docker run twinpool twinpool.router --help
#   docker run twinpool twinpool.prefill_worker --help
#   docker run --entrypoint twinpool twinpool --help
#
# PyTorch is the build that pip finds (see constraints.txt). For the small CPU build, name a package index that has it:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=… -t twinpool .

FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python -m venv /opt/twinpool
# The dependencies come first, from two files that seldom change, so that a change of our code does not fetch them again.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['otel'], sep='\n')" > requirements.txt \
    && /opt/twinpool/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
RUN /opt/twinpool/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
# tini passes signals on: a program that is process 1 itself ignores SIGTERM unless it handles it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /var/cache/twinpool
COPY --from=build /opt/twinpool /opt/twinpool
ENV PATH=/opt/twinpool/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/twinpool \
    TWINPOOL_CACHE=/var/cache/twinpool
# A number, so that Kubernetes can see that it is not root. Nothing outside the cache folder is written.
USER 10001:10001
WORKDIR /var/cache/twinpool
ENTRYPOINT ["tini", "--", "python", "-m"]
CMD ["twinpool.router", "--help"]
