"""Captions of the figures: what to look for in each."""

from __future__ import annotations

LEARNING = (
    "Left: over training steps; right: over wall-clock, including evaluations. A method that learns the same per"
    " step but steps faster is ahead only on the right. Bars on the accuracy are standard errors."
)
SAMPLES = (
    "Of the newest batch, the longest responses, the worst by their reward, the most changed (those whose tokens were"
    " sampled by the oldest weights on average; the log-probs of the trained policy are not on record), and some at"
    " random. A token's tooltip is the log-prob with which it was sampled, that of a stretch its version. By gradient,"
    " tokens are struck out that had none; tokens that a correction rejected are not on record. For other steps:"
    " rollover samples RUN --step N."
)
TIMELINE = (
    "Each bar is a sample, coloured by the policy version that sampled it; a thin line is a sample parked"
    " until a later step. A row that changes colour without ending was rolled over to newer weights. A cross means"
    " never trained. Shaded: training and publishing; a dashed line is a restart. Below: the samples decoding at"
    " each moment; the area missing under a falling curve is idle engine time. Drag to zoom, double-click to go"
    " back."
)
MEMBERS = (
    "One lane for each member of the swarm, or each server: every thin bar is a sample that it decoded, coloured by the"
    " policy version. A vertical mark is a change to newer weights; in an empty stretch, the member was away or had"
    " no call. The staleness of the batches comes from members of different colours at the same moment."
)
LAG = (
    "The number of versions by which tokens were older than the weights they trained; 0 is on-policy. Head lag is the"
    " lag of a sample's oldest token: a line that keeps rising means that some samples are passed over again"
    " and again. All tokens of the batches count here, including those without a gradient."
)
TOKENS = (
    "Every decoded token is trained (it had a gradient), wasted with a cause, or still alive. If the trained"
    " lengths fall short of the generated ones, the schedule favours short answers. Mean trained over mean"
    " generated here: {drift}."
)
TIME = (
    "The phases of a training step. If the first one is large, rollout is the bottleneck; the gap between"
    " the two throughputs is the cost of training, publishing and idling."
)
HEALTH = (
    "Signals to check when learning stalls. An entropy that falls to almost 0 leaves groups of equal responses. A"
    " surprise that stays below the entropy comes from an engine that draws from a part of the distribution (top_k,"
    " top_p, a lower temperature), or from a selection of responses. KL divergences and a small effective sample size"
    " measure how far the trained policy is from the weights that sampled. Right answers that are shorter or longer"
    " than wrong ones pull the length of all responses with them. Curves that are 0 throughout are left out."
)
