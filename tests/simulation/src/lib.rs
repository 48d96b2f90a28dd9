//! The coordinator and the worker agent under a virtual clock, network and disk, with seeded faults.
