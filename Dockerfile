# The image of configs/kubernetes, for the head and the GPU pods:
#
#   docker build -t registry.example.com/rayllm:0.1.0 . && docker push registry.example.com/rayllm:0.1.0
#
# The base has Python, Ray, CUDA and a C compiler, which Triton needs at run time, and runs as user ray (1000).
FROM rayproject/ray:2.60.0-py311-gpu

COPY --chown=1000:100 pyproject.toml setup.py README.md LICENSE /home/ray/rayllm/
COPY --chown=1000:100 rayllm /home/ray/rayllm/rayllm
COPY --chown=1000:100 kernels /home/ray/rayllm/kernels
COPY --chown=1000:100 benchmarks /home/ray/rayllm/benchmarks
RUN pip install --no-cache-dir /home/ray/rayllm && rm -rf /home/ray/rayllm/build

ENV RAY_USAGE_STATS_ENABLED=0
USER 1000
