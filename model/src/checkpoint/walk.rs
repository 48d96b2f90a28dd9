//! A model's blocks one after the other, a sorted parent's or a trained student's, each read while the one before runs, so
//! that a device holds two of them beside what stands around them.
//!
//! A thread reads, and with others decodes, sorts and rounds, one block ahead and no further; whoever walks uploads, since a
//! backend is spoken to by one thread.

use std::fmt::Debug;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use espalier_arch::{Architecture, TensorSpec};

use super::place;
use super::sorted::bytes_of;
use crate::ops::Operations;
use crate::weights::{BlockWeights, SavedModel, read_as};
use crate::{ElementType, Elements, Error, Model};

/// A walk that waits for its reader looks this often whether it should go on.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A block's tensors as they were read.
type Read = Vec<(TensorSpec, Elements)>;

/// A model in files, whose tensors are read one by one, from several threads.
pub trait BlockFiles: Debug + Sync {
    /// Its shape.
    fn architecture(&self) -> &Architecture;

    /// One of the architecture's tensors, row by row, in this type and in the model's own order.
    ///
    /// # Errors
    /// When there is none, or its file cannot be read any more.
    fn read(&self, spec: &TensorSpec, element_type: ElementType) -> Result<Elements, Error>;
}

impl BlockFiles for SavedModel {
    fn architecture(&self) -> &Architecture {
        SavedModel::architecture(self)
    }

    fn read(&self, spec: &TensorSpec, element_type: ElementType) -> Result<Elements, Error> {
        self.elements(spec, element_type)
    }
}

impl dyn BlockFiles + '_ {
    /// Bytes that all of it takes on the backend's device.
    pub fn bytes(&self, operations: &dyn Operations) -> usize {
        bytes_of(&self.architecture().tensors(), operations)
    }

    /// What stands around the blocks: embedding, final norm and head as a model that has none.
    ///
    /// # Errors
    /// When a file cannot be read any more, or the backend runs out of memory.
    pub fn ends(&self, operations: &dyn Operations) -> Result<Model, Error> {
        let around = Architecture {
            blocks: Vec::new(),
            ..self.architecture().clone()
        };
        Model::from_tensors(&around, |spec| {
            let elements = self.read(spec, read_as(operations, spec.role))?;
            place(spec, &elements, operations)
        })
    }

    /// Bytes that [`ends`](Self::ends) take on the backend's device.
    pub fn ends_bytes(&self, operations: &dyn Operations) -> usize {
        let specs = self.architecture().tensors();
        bytes_of(specs.iter().filter(|spec| spec.block.is_none()), operations)
    }

    /// Bytes that the weights of a walk take at the most on the backend's device, beside the ends: the largest block
    /// twice, once as it runs and once on its way.
    pub fn walk_bytes(&self, operations: &dyn Operations) -> usize {
        let specs = self.architecture().tensors();
        let inside = |block| specs.iter().filter(move |spec| spec.block == Some(block));
        let blocks = 0..self.architecture().blocks.len();
        let largest = blocks.map(|block| bytes_of(inside(block), operations)).max();
        largest.unwrap_or(0).saturating_mul(2)
    }

    /// Gives `visit` each of `blocks` in their order on the device; it is dropped when `visit` returns. While the next is
    /// not there yet, `waiting` is asked again and again whether to go on waiting.
    ///
    /// # Errors
    /// When there is no such block, a file cannot be read any more or the backend runs out of memory, and those of `visit`
    /// and `waiting`; nothing is read after an error.
    pub fn walk<E: From<Error>>(
        &self,
        blocks: &[usize],
        operations: &dyn Operations,
        waiting: impl FnMut() -> Result<(), E>,
        mut visit: impl FnMut(usize, &BlockWeights) -> Result<(), E>,
    ) -> Result<(), E> {
        let specs = self.architecture().tensors().into_iter();
        let specs: Vec<(TensorSpec, ElementType)> = specs
            .map(|spec| {
                let element_type = read_as(operations, spec.role);
                (spec, element_type)
            })
            .collect();
        let read = |block| self.read_block(&specs, block);
        read_ahead(blocks, read, waiting, |block, read| {
            let weights = self.placed_block(block, read, operations)?;
            visit(block, &weights)
        })
    }

    fn read_block(&self, specs: &[(TensorSpec, ElementType)], block: usize) -> Result<Read, Error> {
        let own = specs.iter().filter(|(spec, _)| spec.block == Some(block));
        own.map(|(spec, element_type)| Ok((spec.clone(), self.read(spec, *element_type)?)))
            .collect()
    }

    fn placed_block(
        &self,
        block: usize,
        read: Read,
        operations: &dyn Operations,
    ) -> Result<BlockWeights, Error> {
        let architecture = self.architecture();
        let shape = &architecture
            .blocks
            .get(block)
            .ok_or_else(|| Error::OutOfRange {
                what: "block",
                value: block,
                expected: format!("below {}", architecture.blocks.len()),
            })?
            .shape;
        let mut parts = Vec::with_capacity(read.len());
        // Each tensor's elements go as soon as the device has them.
        for (spec, elements) in read {
            parts.push((spec.role, place(&spec, &elements, operations)?));
        }
        let mut weights = BlockWeights::of_parts(shape, architecture.hidden, &parts)?;
        weights.stack(operations)?;
        Ok(weights)
    }
}

/// Gives `take` what `read` made of each item, in order; one item is read ahead, by a thread that has ended when this
/// returns.
fn read_ahead<T: Send, E: From<Error>>(
    items: &[usize],
    read: impl Fn(usize) -> Result<T, Error> + Sync,
    mut waiting: impl FnMut() -> Result<(), E>,
    mut take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    let read = &read;
    std::thread::scope(|scope| {
        // Nothing lies in the channel: what is ahead is in the reader's hands until it is taken.
        let (sender, receiver) = mpsc::sync_channel(0);
        let reader = std::thread::Builder::new().name("read-ahead".to_owned());
        reader
            .spawn_scoped(scope, move || {
                for item in items {
                    let made = read(*item);
                    let failed = made.is_err();
                    if sender.send(made).is_err() || failed {
                        return;
                    }
                }
            })
            .map_err(|source| Error::Reader { source })?;
        for item in items {
            let made = receive(&receiver, &mut waiting)?;
            take(*item, made?)?;
        }
        Ok(())
    })
}

fn receive<T, E: From<Error>>(
    receiver: &Receiver<Result<T, Error>>,
    waiting: &mut impl FnMut() -> Result<(), E>,
) -> Result<Result<T, Error>, E> {
    loop {
        match receiver.recv_timeout(LOOK_INTERVAL) {
            Ok(made) => return Ok(made),
            Err(RecvTimeoutError::Timeout) => waiting()?,
            // It sends before it ends, unless it panicked: the scope passes that on.
            Err(RecvTimeoutError::Disconnected) => {
                let source = io::Error::other("it ended before its last block");
                return Ok(Err(Error::Reader { source }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::checkpoint::sorted::tests::{backwards, sorted, tiny};
    use crate::checkpoint::{Parent, SortedParent};
    use crate::ops::cpu::CpuOperations;

    /// Something that is counted while it lives.
    struct Counted<'a>(&'a AtomicUsize);

    impl<'a> Counted<'a> {
        fn new(alive: &'a AtomicUsize, most: &AtomicUsize) -> Self {
            let now = alive.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            Self(alive)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn never() -> Result<(), Error> {
        Ok(())
    }

    #[test]
    fn the_next_is_read_while_one_is_taken_and_none_further() {
        let (alive, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let items: Vec<usize> = (0..20).collect();
        let mut taken = Vec::new();
        let read = |_| Ok(Counted::new(&alive, &most));
        read_ahead(&items, read, never, |item, made| {
            // Time enough for a reader that did not wait to run away.
            std::thread::sleep(Duration::from_millis(2));
            taken.push(item);
            drop(made);
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, items);
        assert_eq!(most.load(Ordering::SeqCst), 2);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn an_error_on_either_side_ends_both() {
        let refused = || Error::OutOfRange {
            what: "item",
            value: 3,
            expected: "another".to_owned(),
        };
        let (reads, takes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let run = |unreadable: usize, untakeable: usize| -> Result<(), Error> {
            let read = |item| {
                reads.fetch_add(1, Ordering::SeqCst);
                if item == unreadable {
                    Err(refused())
                } else {
                    Ok(())
                }
            };
            read_ahead(&[0, 1, 2, 3, 4, 5], read, never, |item, ()| {
                takes.fetch_add(1, Ordering::SeqCst);
                if item == untakeable {
                    Err(refused())
                } else {
                    Ok(())
                }
            })
        };
        assert!(run(3, 9).is_err());
        assert_eq!(
            (reads.swap(0, Ordering::SeqCst), takes.swap(0, Ordering::SeqCst)),
            (4, 3)
        );
        assert!(run(9, 3).is_err());
        assert!(reads.load(Ordering::SeqCst) <= 5, "one ahead of the fourth");
        assert_eq!(takes.load(Ordering::SeqCst), 4);
    }

    #[test]
    fn who_waits_for_a_slow_disk_can_be_stopped() {
        let (release, held) = mpsc::channel::<()>();
        let held = std::sync::Mutex::new(held);
        let read = |_| {
            // Until the walk has given up.
            let _ = held.lock().unwrap().recv();
            Ok(())
        };
        let mut release = Some(release);
        let mut asked = 0;
        let waiting = || {
            asked += 1;
            if asked < 3 {
                return Ok(());
            }
            release = None;
            Err(Error::SharedTensor)
        };
        let stopped = read_ahead(&[1, 2], read, waiting, |_, ()| Ok(()));
        assert!(stopped.is_err());
        assert_eq!(asked, 3);
    }

    #[test]
    fn a_walk_gives_the_blocks_of_the_sorted_model_and_reads_no_other() {
        let host = CpuOperations::new();
        let sorted = sorted();
        let source: &dyn BlockFiles = &sorted;
        let model = backwards(source.architecture())
            .apply(&tiny().load(&host).unwrap(), &host)
            .unwrap();
        let ends = source.ends(&host).unwrap();
        assert_eq!(sorted.loaded_bytes(), source.ends_bytes(&host));
        assert_eq!(ends.bytes(), source.ends_bytes(&host));
        assert_eq!(
            host.download(ends.head()).unwrap(),
            host.download(model.head()).unwrap()
        );
        let before = sorted.loaded_bytes();
        let (mut seen, mut bytes) = (Vec::new(), 0);
        let wanted = [0, 3, 4, model.blocks.len() - 1];
        source
            .walk(&wanted, &host, never, |block, weights| {
                seen.push(block);
                for ((role, own), (_, expected)) in
                    weights.tensors().into_iter().zip(model.blocks[block].tensors())
                {
                    bytes += own.bytes();
                    assert_eq!(host.download(own)?, host.download(expected)?, "{block} {role:?}");
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, wanted);
        assert_eq!(sorted.loaded_bytes() - before, bytes);
        let largest = model
            .blocks
            .iter()
            .map(|block| -> usize { block.tensors().iter().map(|(_, tensor)| tensor.bytes()).sum() });
        assert_eq!(source.walk_bytes(&host), 2 * largest.max().unwrap());
        let beyond = source.walk(&[model.blocks.len()], &host, never, |_, _| Ok(()));
        assert!(beyond.unwrap_err().to_string().contains("block"));
    }

    #[test]
    fn a_file_that_is_cut_in_the_middle_of_a_walk_is_one_error_that_names_it() {
        let host = CpuOperations::new();
        let directory = tempfile::tempdir().unwrap();
        let original = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        for entry in std::fs::read_dir(original).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
        }
        let weights = directory.path().join("model.safetensors");
        let parent = Parent::open(directory.path().to_str().unwrap()).unwrap();
        let source: &dyn BlockFiles = &SortedParent::new(parent, None).unwrap();
        let blocks: Vec<usize> = (0..source.architecture().blocks.len()).collect();
        let mut visited = 0;
        let cut = source.walk(&blocks, &host, never, |_, _| {
            visited += 1;
            if visited == 2 {
                cut_to(&weights, 4096);
            }
            Ok(())
        });
        let told = cut.unwrap_err();
        assert!(matches!(told, Error::Io { .. }), "{told:?}");
        let told = told.to_string();
        assert!(
            told.contains("model.safetensors") && told.contains("cut short"),
            "{told}"
        );
        assert!((2..=3).contains(&visited), "one was ahead: {visited}");
    }

    fn cut_to(path: &Path, bytes: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(bytes).unwrap();
    }
}
