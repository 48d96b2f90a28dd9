//! Every call against float64: each rank knows what every rank gives, and works out what should come.

use espalier_model::{ElementType, Tensor};

use super::Failure;
use super::rank::{Backend, Formed, tensor};

/// Largest error of a sum, of the sum of magnitudes: rounding of each addition.
const F32_BOUND: f64 = 1.2e-7;
const BF16_BOUND: f64 = 1.0 / 256.0;

/// What was compared, and how it went.
struct Tally<'a> {
    backend: &'a Backend,
    formed: &'a Formed,
    element_type: ElementType,
    comparisons: usize,
    wrong: usize,
    largest: f64,
}

/// Runs all comparisons, or those of small shapes; says how many were wrong.
pub fn run(backend: &Backend, formed: &Formed, large: bool) -> Result<String, Failure> {
    let types: &[ElementType] = match backend {
        Backend::Cpu(_) => &[ElementType::F32],
        Backend::Cuda(_) => &[ElementType::F32, ElementType::Bf16],
    };
    let (mut comparisons, mut wrong, mut words) = (0, 0, Vec::new());
    for &element_type in types {
        let mut tally = Tally {
            backend,
            formed,
            element_type,
            comparisons: 0,
            wrong: 0,
            largest: 0.0,
        };
        tally.all(large)?;
        comparisons += tally.comparisons;
        wrong += tally.wrong;
        words.push(format!("{element_type} sums within {:.1e}", tally.largest));
    }
    formed.gang.check()?;
    Ok(format!(
        "{comparisons} comparisons with float64, {}, {wrong} wrong",
        words.join(", ")
    ))
}

impl Tally<'_> {
    fn all(&mut self, large: bool) -> Result<(), Failure> {
        let size = self.formed.gang.size();
        let mut shapes = vec![(1, 1), (3, 7), (5, 333)];
        if large {
            shapes.extend([(64, 1021), (1, (4 << 20) + 13), (2049, 2047)]);
        }
        for (seed, &(rows, columns)) in shapes.iter().enumerate() {
            self.sums(seed, rows, columns)?;
            self.copies(seed, rows, columns)?;
            self.messages(seed, rows, columns)?;
        }
        let columns = if large { 1 << 20 } else { 1 << 12 };
        self.many_at_a_time(size, columns)
    }

    fn rank(&self) -> usize {
        self.formed.gang.rank()
    }

    fn size(&self) -> usize {
        self.formed.gang.size()
    }

    /// What `rank` gives.
    fn given(&self, rank: usize, seed: usize, count: usize) -> Vec<f32> {
        let mixed = |value: usize, factor: u64| (value as u64 + 1).wrapping_mul(factor);
        let mut state = mixed(rank, 0x9e37_79b9_7f4a_7c15) ^ mixed(seed, 0xd1b5_4a32_d192_ed03);
        (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Of magnitudes so far apart that sums are rounded.
                let value =
                    ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2_f32.powi((state & 15) as i32 - 8);
                match self.element_type {
                    ElementType::F32 => value,
                    ElementType::Bf16 => half::bf16::from_f32(value).to_f32(),
                }
            })
            .collect()
    }

    fn own(&self, seed: usize, rows: usize, columns: usize) -> Result<Tensor, Failure> {
        let given = self.given(self.rank(), seed, rows * columns);
        Ok(tensor(
            self.backend.operations(),
            &given,
            rows,
            self.element_type,
        )?)
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, Failure> {
        Ok(self.backend.operations().download(tensor)?)
    }

    /// Notes whether elements are those expected, to the bit.
    fn same(&mut self, what: &str, found: &[f32], expected: &[f32]) {
        self.comparisons += 1;
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        if bits(found) != bits(expected) {
            self.wrong += 1;
            println!("WRONG {what} of {} {}", expected.len(), self.element_type);
        }
    }

    /// Notes how far `found` is from the sum of what all ranks gave from `start` on.
    fn near(&mut self, what: &str, found: &[f32], given: &[Vec<f32>], start: usize) {
        let mut worst: f64 = 0.0;
        for (index, &value) in found.iter().enumerate() {
            let terms = given
                .iter()
                .map(|one| f64::from(one.get(start + index).copied().unwrap_or(f32::NAN)));
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all): (f64, f64), term| {
                (sum + term, all + term.abs())
            });
            let error = (f64::from(value) - sum).abs() / magnitude.max(f64::MIN_POSITIVE);
            worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
        }
        self.comparisons += 1;
        self.largest = self.largest.max(worst);
        let unit = match self.element_type {
            ElementType::F32 => F32_BOUND,
            ElementType::Bf16 => BF16_BOUND,
        };
        if worst > unit * (self.size() - 1) as f64 {
            self.wrong += 1;
            println!(
                "WRONG {what} of {} {}: error {worst:.2e}",
                found.len(),
                self.element_type
            );
        }
    }

    fn sums(&mut self, seed: usize, rows: usize, columns: usize) -> Result<(), Failure> {
        let (size, all) = (self.size(), self.formed.all.clone());
        let count = rows * columns;
        let given: Vec<Vec<f32>> = (0..size).map(|rank| self.given(rank, seed, count)).collect();
        let first = all.all_reduce(self.own(seed, rows, columns)?)?;
        let again = all.all_reduce(self.own(seed, rows, columns)?)?.wait()?;
        let first = self.download(&first.wait()?)?;
        self.near("all_reduce", &first, &given, 0);
        let again = self.download(&again)?;
        self.same("all_reduce a second time", &again, &first);
        let all_bits = self.formed.gang.exchange(&digest(&first))?;
        self.comparisons += 1;
        if all_bits.iter().any(|bits| *bits != digest(&first)) {
            self.wrong += 1;
            println!("WRONG all_reduce of {count} {}: ranks differ", self.element_type);
        }
        let given: Vec<Vec<f32>> = (0..size)
            .map(|rank| self.given(rank, seed, count * size))
            .collect();
        let share = all
            .reduce_scatter(self.own(seed, rows * size, columns)?)?
            .wait()?;
        let share = self.download(&share)?;
        self.near("reduce_scatter", &share, &given, count * self.rank());
        Ok(())
    }

    fn copies(&mut self, seed: usize, rows: usize, columns: usize) -> Result<(), Failure> {
        let (size, all) = (self.size(), self.formed.all.clone());
        let expected: Vec<f32> = (0..size)
            .flat_map(|rank| self.given(rank, seed, rows * columns))
            .collect();
        let whole = all.all_gather(self.own(seed, rows, columns)?)?.wait()?;
        let whole = self.download(&whole)?;
        self.same("all_gather", &whole, &expected);
        for root in 0..size {
            let tensor = all.broadcast(self.own(seed, rows, columns)?, root)?.wait()?;
            let found = self.download(&tensor)?;
            let expected = self.given(root, seed, rows * columns);
            self.same("broadcast", &found, &expected);
        }
        Ok(())
    }

    /// Every rank sends to all others before it receives, twice each.
    fn messages(&mut self, seed: usize, rows: usize, columns: usize) -> Result<(), Failure> {
        let (rank, all) = (self.rank(), self.formed.all.clone());
        let others: Vec<usize> = (0..self.size()).filter(|&other| other != rank).collect();
        for &other in &others {
            drop(all.send(self.own(seed, rows, columns)?, other)?);
            drop(all.send(self.own(seed + 100, columns, rows)?, other)?);
        }
        for &other in &others {
            let one = all.receive(rows, columns, self.element_type, other)?;
            let two = all.receive(columns, rows, self.element_type, other)?;
            let (two, one) = (two.wait()?, one.wait()?);
            let found = [self.download(&one)?, self.download(&two)?].concat();
            let count = rows * columns;
            let expected = [
                self.given(other, seed, count),
                self.given(other, seed + 100, count),
            ]
            .concat();
            self.same("send and receive", &found, &expected);
        }
        Ok(())
    }

    /// Many calls under way, some of which nobody waits for, while their memory is asked for again.
    fn many_at_a_time(&mut self, size: usize, columns: usize) -> Result<(), Failure> {
        let all = self.formed.all.clone();
        let mut flights = Vec::new();
        for seed in 0..24 {
            let flight = all.all_reduce(self.own(seed, 1, columns)?)?;
            if seed % 3 == 0 {
                drop(flight);
            } else {
                flights.push((seed, flight));
            }
            // Filled with something else at once.
            drop(self.backend.operations().zeros(1, columns, self.element_type)?);
        }
        for (seed, flight) in flights.into_iter().rev() {
            let found = self.download(&flight.wait()?)?;
            let given: Vec<Vec<f32>> = (0..size).map(|rank| self.given(rank, seed, columns)).collect();
            self.near("one of many all_reduce", &found, &given, 0);
        }
        Ok(())
    }
}

fn digest(values: &[f32]) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    for value in values {
        hasher.update(&value.to_bits().to_le_bytes());
    }
    hasher.finalize().as_bytes().to_vec()
}
