//! The agent, its device children, and the executors that run tasks
