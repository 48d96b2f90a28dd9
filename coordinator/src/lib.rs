//! Jobs, stages, the scheduler, the journal, and the services over them
pub mod spec;
