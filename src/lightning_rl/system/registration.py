"""Register the tasks in Gymnasium; the code of a task is imported when an env is made."""

import gymnasium

for _name in ("CartPole", "PushCube", "PointMass"):
    gymnasium.register(
        f"lightning_rl/{_name}-v0",
        entry_point="lightning_rl.extensions.tasks.gymnasium_tasks:GymnasiumTask",
        vector_entry_point="lightning_rl.extensions.tasks.gymnasium_tasks:GymnasiumVectorTask",
        kwargs={"task": _name},
    )

gymnasium.register(  # takes any batched env, `task`
    "lightning_rl/Task-v0",
    entry_point="lightning_rl.extensions.tasks.gymnasium_tasks:GymnasiumTask",
)
gymnasium.register(
    "lightning_rl/Robot-v0", entry_point="lightning_rl.extensions.robots.env:RobotEnv"
)
