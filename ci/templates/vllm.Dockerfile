# syntax=docker/dockerfile:1
# The image of the vLLM that you serve with, and aotgaudi beside it in an environment of its own: nothing of vLLM's changes.
# The build context holds a wheel of aotgaudi, from a checkout or git+https://...:
#
#   pip wheel --no-deps --wheel-dir dist AOTGAUDI
#   docker build -f vllm.Dockerfile --build-arg VLLM_IMAGE=IMAGE -t registry.example/team/vllm-aotgaudi:v1 .
#
# The same image builds the capture, for its files hold the paths of this image:
#
#   docker run --rm -v ./model:/model:ro -v ./out:/out -v ./keys:/keys:ro --tmpfs /run/aotgaudi:exec,mode=0700 \
#     --entrypoint aotgaudi registry.example/team/vllm-aotgaudi:v1 \
#     build capture -o /out/chat.bundle --store /out/store --sign-key /keys/bundle.key -- vllm serve /model --max-model-len 4096
#
# and serves from it: vllm-kubernetes.yaml, vllm-compose.yaml.
ARG VLLM_IMAGE
FROM ${VLLM_IMAGE}
COPY dist /opt/aotgaudi/dist
# The light package: no torch. The wheel carries the versions that it was tested with.
RUN python3 -m zipfile -e /opt/aotgaudi/dist/aotgaudi-*.whl /opt/aotgaudi/wheel \
 && python3 -m venv /opt/aotgaudi/venv \
 && /opt/aotgaudi/venv/bin/pip install --no-cache-dir --constraint /opt/aotgaudi/wheel/aotgaudi/constraints.txt \
    /opt/aotgaudi/dist/aotgaudi-*.whl \
 && rm -r /opt/aotgaudi/wheel \
 && ln -s /opt/aotgaudi/venv/bin/aotgaudi /usr/local/bin/aotgaudi
EXPOSE 8000 9400
ENTRYPOINT ["aotgaudi", "run", "--bundle", "/opt/aotgaudi/bundle", "--require-warm", "--listen", "0.0.0.0:9400", "--"]
CMD ["vllm", "serve", "/model", "--max-model-len", "4096"]
