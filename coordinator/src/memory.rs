//! How the allocator of a coordinator's own process keeps what was freed.

/// Has freed memory go back to the system rather than be kept for each thread: a coordinator is to stay small
/// beside whatever else its host does, and its large buffers (a stage's frame, an archive) are short-lived. For
/// processes that are nothing but a coordinator; call it early. Does nothing where the C library is not glibc
/// (mallopt(3) has the options).
pub fn stay_small() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let options = [
            // Of its own accord glibc keeps a heap for each of up to 8 threads a processor.
            (libc::M_ARENA_MAX, 2),
            // Set, so that it does not grow with the largest buffer ever freed, as it does by default.
            (libc::M_MMAP_THRESHOLD, 256 << 10),
            (libc::M_TRIM_THRESHOLD, 1 << 20),
        ];
        for (option, value) in options {
            // SAFETY: mallopt only sets numbers of the allocator, under its lock.
            if unsafe { libc::mallopt(option, value) } == 0 {
                tracing::debug!(option, value, "the allocator does not take the option");
            }
        }
    }
}
