# A server in a container, for the CPU or for CUDA:
#   docker build -t longspec .
#   docker build -t longspec:cuda --build-arg TORCH=cuda .
#   docker run --init -p 127.0.0.1:8000:8000 -v longspec-models:/models longspec
#   docker run --init --gpus all -p 127.0.0.1:8000:8000 -v longspec-models:/models longspec:cuda --target qwq
FROM python:3.12-slim

# "cpu" is 200 MB of torch; "cuda" brings the CUDA libraries from PyPI, so that the host needs only its driver.
ARG TORCH=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# Our code for the CPU, and a small launcher of Triton, are compiled when they are first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/longspec
COPY constraints.txt ./
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && if [ "$TORCH" = cuda ]; then pip install --no-cache-dir -c constraints.txt "torch==$version"; \
    else pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_CPU_INDEX" "torch==$version+cpu"; fi

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

# Models and measurements are kept in the volume, and nothing runs as root.
RUN useradd --create-home --uid 1000 longspec && mkdir /models && chown longspec /models
USER longspec
ENV LONGSPEC_CACHE=/models/longspec HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=30s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["longspec", "serve", "--host", "0.0.0.0"]
