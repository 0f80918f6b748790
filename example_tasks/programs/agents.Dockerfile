# Command-line agents as they are shipped. Fixed releases: a new one asks its model other things.
FROM node:22-slim
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates git python3 python3-pip && \
    rm -rf /var/lib/apt/lists/*
RUN npm install -g @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169.0
# The client library of mini-swe-agent imports mcp and does not ask for it.
RUN pip install --no-cache-dir --break-system-packages mini-swe-agent==2.4.6 'mcp>=2,<3'
WORKDIR /work
CMD ["tail", "-f", "/dev/null"]
