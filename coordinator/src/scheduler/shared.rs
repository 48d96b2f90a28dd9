//! Tasks that copies of a state share, as JSON: each as if it were nobody else's.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serializer};

use super::{Task, TaskId};

type Shared = BTreeMap<TaskId, Arc<Task>>;

pub fn serialize<S: Serializer>(tasks: &Shared, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(tasks.iter().map(|(id, task)| (id, task.as_ref())))
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Shared, D::Error> {
    let tasks = BTreeMap::<TaskId, Box<Task>>::deserialize(deserializer)?;
    Ok(tasks
        .into_iter()
        .map(|(id, task)| (id, Arc::from(task)))
        .collect())
}
