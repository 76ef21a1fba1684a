# The service, in two stages: what it takes to build it stays in the first.
#
# BASE is any Debian with Python 3.11 or newer, venv and root certificates. The default is the interpreter that the tests run on. It has
# never been pulled where this file was tried: no image registry could be reached there, and `make container-proof` builds on a Debian
# made by debootstrap instead. Whoever releases an image pins what they build on: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1
WORKDIR /build
COPY pyproject.toml requirements.lock requirements-build.lock requirements-uv.lock ./
# Dependencies are resolved from pyproject.toml, without the extra that brings a Postgres, among the versions and hashes of the lock:
# what is not in it, or differs from it by a byte, is refused.
RUN python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-deps --require-hashes -r requirements-uv.lock -r requirements-build.lock \
 && python3 -m venv --without-pip /opt/countermand \
 && /opt/tools/bin/uv pip install --python /opt/countermand --compile-bytecode --require-hashes --constraint requirements.lock -r pyproject.toml
COPY README.md LICENSE ./
COPY app app
COPY migrations migrations
RUN /opt/tools/bin/hatchling build --target wheel --directory /build/dist \
 && /opt/tools/bin/uv pip install --python /opt/countermand --compile-bytecode --no-deps --no-index dist/*.whl \
 && /opt/tools/bin/uv pip check --python /opt/countermand

FROM ${BASE}
LABEL org.opencontainers.image.title="Countermand" \
      org.opencontainers.image.description="An HTTP saga orchestrator for AI agents' tool side effects" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/countermand /opt/countermand
# The host: inside a container loopback reaches nobody. What is published, and where, is the choice of who runs it.
ENV PATH=/opt/countermand/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 COUNTERMAND_HOST=0.0.0.0
WORKDIR /opt/countermand
USER 10001:10001
EXPOSE 8420
# Liveness, not readiness: a database that is away for a while is no reason to start the service anew.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["countermand", "health"]
ENTRYPOINT ["countermand"]
CMD ["serve"]
