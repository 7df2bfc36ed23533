from .run_follower import RunFollower as RunFollower
from .screen import draw as draw, sparkline as sparkline
from .state import (
    RankTime as RankTime,
    RunFiles as RunFiles,
    RunHistory as RunHistory,
    RunState as RunState,
    state_of as state_of,
)
