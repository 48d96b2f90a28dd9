//! Score: what each variant of a block costs in quality, all other blocks whole (Puzzle, 2411.19146).
//!
//! Each variant branches off the parent's own states before its block and runs through the rest of the parent; a batch's
//! variants of one block are compared to the parent in one pass over the vocabulary. Several blocks of a parent that is
//! streamed are scored in one walk, as many as have room: it costs the reading once, as that of one block does.

use std::ops::Range;

use espalier_arch::Variant;
use espalier_model::ops::Head;
use espalier_proto::task::{ScoreBlocks, TaskOutput};
use espalier_search::Score;

use super::caches::states_bytes;
use super::divergence::Divergences;
use super::parent::{Blocks, Held};
use super::streams::{Form, Part, groups};
use super::{Caches, Context};
use crate::{Error, Result};

/// A block and the variants of it that are scored.
type Scored<'a> = (usize, &'a [Variant]);

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &ScoreBlocks) -> Result<TaskOutput> {
    let held = caches.held(context, &task.parent)?;
    let depth = held.architecture().blocks.len();
    let scored = task.blocks();
    check(&scored, depth)?;
    let walks = walks(context, held.blocks(), task, &scored);
    let mut scores = Vec::new();
    for (index, walk) in walks.iter().enumerate() {
        let own = scored.get(walk.clone()).unwrap_or_default();
        let note = note(own);
        let part = Part {
            index,
            of: walks.len(),
            note: &note,
        };
        scores.extend(score(context, caches, (task, &held), own, part)?);
    }
    context.progress(depth, depth, "blocks", || note(&scored))?;
    Ok(TaskOutput::Score { scores })
}

/// Refuses blocks that the parent has not, or that are not in their order.
fn check(scored: &[Scored<'_>], depth: usize) -> Result<()> {
    let mut least = 0;
    for (block, _) in scored {
        if !(least..depth).contains(block) {
            let reason = format!(
                "block is {block}, expected {least} to {}",
                depth.saturating_sub(1)
            );
            return Err(Error::Invalid { reason });
        }
        least = block + 1;
    }
    Ok(())
}

/// Which of the blocks are scored in one walk: as many as have room with a batch in all of their variants.
fn walks(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    task: &ScoreBlocks,
    scored: &[Scored<'_>],
) -> Vec<Range<usize>> {
    let shard = &task.shard;
    let rows = shard.sequences.saturating_mul(shard.sequence_tokens);
    let together = blocks.plan(context).rows(blocks.architecture());
    let batch = states_bytes(context, blocks, together.max(shard.sequence_tokens).min(rows));
    // Of the shard its last states are kept, and those before the block that comes next; of a batch there are the parent's
    // own, too.
    let kept = states_bytes(context, blocks, rows).saturating_mul(2);
    let room = blocks.room(context, kept).saturating_sub(batch);
    groups(scored, |(_, variants)| variants.len().saturating_mul(batch), room)
}

/// What the variants of some blocks cost, in one walk for as many batches as have room.
fn score(
    context: &Context<'_>,
    caches: &mut Caches,
    (task, held): (&ScoreBlocks, &Held),
    scored: &[Scored<'_>],
    part: Part<'_>,
) -> Result<Vec<Score>> {
    let mut forms = Vec::new();
    for (block, variants) in scored {
        for variant in *variants {
            forms.push(Form::but_for(held.architecture(), *block, variant)?);
        }
    }
    let divergences = scored
        .iter()
        .map(|(_, variants)| Divergences::new(variants.len()));
    let mut divergences: Vec<Divergences> = divergences.collect();
    let runner = held.blocks().runner();
    let head = runner.model().head();
    let parent = (&task.parent, held);
    caches.branches(context, parent, &task.shard, &forms, part, |batch, states| {
        let parent = Head {
            hidden: &batch.finals,
            weight: head,
        };
        let mut states = states.into_iter();
        for ((_, variants), sums) in scored.iter().zip(&mut divergences) {
            context.check_cancelled()?;
            let of_block = states.by_ref().take(variants.len());
            let students = of_block.map(|hidden| runner.final_norm(&hidden));
            let students = students.collect::<espalier_model::Result<Vec<_>>>()?;
            sums.add(&*context.operations, &students, head, parent, batch.layout)?;
        }
        Ok(())
    })?;
    let mut scores = Vec::with_capacity(forms.len());
    for ((block, variants), sums) in scored.iter().zip(&divergences) {
        let means = variants.iter().zip(sums.means());
        scores.extend(means.map(|(variant, mean)| Score {
            block: *block,
            variant: variant.clone(),
            divergence: mean.mean,
            standard_error: mean.error,
            tokens: sums.tokens(),
        }));
    }
    Ok(scores)
}

/// What is scored, in one line.
fn note(scored: &[Scored<'_>]) -> String {
    let variants: usize = scored.iter().map(|(_, variants)| variants.len()).sum();
    match scored {
        [] => String::new(),
        [(block, _)] => format!("{variants} variants of block {block}"),
        [(first, _), .., (last, _)] => format!("{variants} variants of blocks {first} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::path::PathBuf;

    use espalier_arch::BlockShape;
    use espalier_artifact::BlockingStore;
    use espalier_model::Device;
    use espalier_model::checkpoint::Parent;
    use espalier_proto::task::{BlockVariants, ParentRef, Shard};

    use super::super::Backend;
    use super::*;
    use crate::data::shard::{self, Sequences};

    struct Bench {
        _directory: tempfile::TempDir,
        store: BlockingStore,
        parent: ParentRef,
        /// Of each block, what is scored.
        variants: Vec<Vec<Variant>>,
        /// Bytes of the whole parent, and of its blocks.
        bytes: (u64, u64),
    }

    fn bench() -> Bench {
        let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        let source = tiny.to_str().unwrap().to_owned();
        let parent = Parent::open(&source).unwrap();
        let blocks = parent.architecture.blocks.iter();
        let variants = blocks.map(|block| {
            let smaller = match &block.shape {
                BlockShape::Mlp(mlp) => Variant::Mlp {
                    channels: mlp.channels / 2,
                },
                _ => Variant::Attention { kv_groups: 1 },
            };
            vec![Variant::Whole, smaller, Variant::Skip]
        });
        let variants = variants.collect();
        let parameters = parent.architecture.parameters();
        let directory = tempfile::tempdir().unwrap();
        let store = BlockingStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        Bench {
            _directory: directory,
            store,
            parent: ParentRef {
                fingerprint: parent.fingerprint().unwrap(),
                source,
                permutation: None,
            },
            variants,
            bytes: (4 * parameters.total, 4 * parameters.in_blocks()),
        }
    }

    impl Bench {
        fn shard(&self, sequences: u32) -> Shard {
            let tokens: Vec<u32> = (0..32 * sequences).map(|token| token * 7 % 1024).collect();
            let sequences = Sequences {
                tokens,
                sequence_tokens: 32,
            };
            shard::write(&self.store, &sequences).unwrap()
        }

        fn task(&self, shard: &Shard, blocks: Range<usize>) -> ScoreBlocks {
            let further = (blocks.start + 1..blocks.end).map(|block| BlockVariants {
                block,
                variants: self.variants[block].clone(),
            });
            ScoreBlocks {
                parent: self.parent.clone(),
                block: blocks.start,
                variants: self.variants[blocks.start].clone(),
                further: further.collect(),
                shard: shard.clone(),
            }
        }

        /// The scores that tasks give, one after the other, and the bytes of blocks that each of them read.
        fn scores(&self, limit: Option<u64>, tasks: &[ScoreBlocks]) -> (Vec<Score>, Vec<u64>) {
            let backend = Backend::open(Device::Cpu, limit).unwrap();
            let context = Context::new(&backend, &self.store, Box::new(|_| ()), Box::new(|| None));
            let mut caches = Caches::default();
            let held = caches.held(&context, &self.parent).unwrap();
            let (mut all, mut reads) = (Vec::new(), Vec::new());
            for task in tasks {
                let before = held.loaded_bytes();
                let TaskOutput::Score { scores } = run(&context, &mut caches, task).unwrap() else {
                    panic!("another output")
                };
                all.extend(scores);
                reads.push(u64::try_from(held.loaded_bytes() - before).unwrap());
            }
            (all, reads)
        }
    }

    #[test]
    fn several_blocks_are_scored_in_one_walk_and_give_what_each_gives_by_itself() {
        let bench = bench();
        let (total, in_blocks) = bench.bytes;
        let shard = bench.shard(2);
        let tasks = [2..6, 6..10, 10..12].map(|blocks| bench.task(&shard, blocks));
        let one_by_one: Vec<ScoreBlocks> = (2..12)
            .map(|block| bench.task(&shard, block..block + 1))
            .collect();
        let (expected, _) = bench.scores(None, &one_by_one);
        assert_eq!(expected.len(), 10 * 3);
        let streamed = Some(total * 6 / 10);
        let (together, reads) = bench.scores(streamed, &tasks);
        assert_eq!(together, expected);
        // All six layers from the tokens on; then what comes after the block before which the last task left the parent.
        assert_eq!(reads, [6, 3, 1].map(|layers| layers * in_blocks / 6));
        assert_eq!(bench.scores(streamed, &one_by_one).0, expected);
        assert_eq!(bench.scores(None, &tasks).0, expected);
    }

    #[test]
    fn blocks_that_have_no_room_together_are_scored_in_several_walks_of_one_task() {
        let bench = bench();
        let (total, in_blocks) = bench.bytes;
        // A batch's states are some 480 KiB: three variants of one block and the parent's own are more than there is room for.
        let shard = bench.shard(40);
        let streamed = Some(total * 6 / 10);
        let (expected, _) = bench.scores(None, &[bench.task(&shard, 4..8)]);
        let (apart, reads) = bench.scores(streamed, &[bench.task(&shard, 4..8)]);
        assert_eq!(apart, expected);
        assert!(
            (2 * in_blocks..3 * in_blocks).contains(&reads[0]),
            "{reads:?} of {in_blocks}"
        );
    }

    #[test]
    fn blocks_that_are_not_the_parents_or_not_in_order_are_refused() {
        let variants = [Variant::Skip];
        for (blocks, told) in [
            (vec![12], "block is 12, expected 0 to 11"),
            (vec![3, 3], "block is 3, expected 4 to 11"),
            (vec![3, 5, 4], "block is 4, expected 6 to 11"),
        ] {
            let scored: Vec<Scored<'_>> = blocks.into_iter().map(|block| (block, &variants[..])).collect();
            let refused = check(&scored, 12).unwrap_err().to_string();
            assert!(refused.contains(told), "{refused}");
        }
    }
}
