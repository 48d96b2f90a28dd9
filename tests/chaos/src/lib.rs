//! Real coordinators and workers, killed, stopped, cut off and starved: the kit that the tests and checks share.
