# `assisted serve` in a slim image: the kernels in C are compiled in the first stage, and the second one has no compiler.
#
#   docker build -t assisted .
#   docker run -p 8000:8000 assisted zoo:target --name target --draft zoo:draft
#
# --build-arg TORCH_ARGS="--index-url ..." chooses the build of PyTorch, as for the make targets.

FROM python:3.11 AS wheel
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY assisted assisted
RUN ASSISTED_LIBRARIES=1 pip wheel --no-deps --wheel-dir /wheel .

FROM python:3.11-slim
ARG TORCH_ARGS=""
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt $TORCH_ARGS torch
RUN --mount=from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir -c constraints.txt /wheel/*.whl
RUN useradd --create-home assisted
USER assisted
EXPOSE 8000
ENTRYPOINT ["assisted", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["zoo:target", "--name", "target", "--draft", "zoo:draft"]
