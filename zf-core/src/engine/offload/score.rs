//! The scores of columns, the same bits for every number of ranks and every way of sharding.
//!
//! A column's score is a sum over rows that lie on several ranks. Sums of floating-point numbers depend on where shards end;
//! integers do not: each addend is rounded to a multiple of 2^(E-40), where E is the exponent of the weight's largest value, on
//! which ranks agree first. No gradient is gathered: the ranks exchange one number a weight and one number a column.

use tch::{Kind, Tensor};

use super::columns::{Block, Columns, Shape};
use crate::engine::flat::FlatState;
use crate::norm::{Kernel, Level};
use crate::stage::{Collective, Group, Reduce, Request, Score, ScoreInput, ScoreReduction, Transport};
use crate::{Error, Result};

/// Bits below the exponent of the largest addend that are kept.
const BITS: i32 = 40;

/// One weight that is chosen from.
pub(crate) struct Weight<'a> {
    pub(crate) flat: &'a FlatState,
    pub(crate) slot: usize,
    pub(crate) shape: Shape,
    /// The elements of the weight for which this rank answers.
    pub(crate) blocks: Vec<Block>,
    /// By block, what the score reads, in the flat buffer's order: gradient, weight, second moment.
    pub(crate) inputs: Vec<[Option<Tensor>; 3]>,
}

impl<'a> Weight<'a> {
    /// The parts of one slot of `flat` for which this rank answers.
    pub(crate) fn new(flat: &'a FlatState, slot: usize, shapes: &[Shape]) -> Self {
        let segments = flat.segments(&flat.reduction.summed).into_iter().filter(|segment| segment.slot == slot);
        let columns = Columns::new(&flat.spec.slots, shapes, segments.map(|segment| (segment.slot, segment.range)));
        Self { flat, slot, shape: shapes[slot], blocks: columns.blocks, inputs: Vec::new() }
    }

    fn columns(&self) -> usize {
        self.shape.count(self.flat.spec.slots[self.slot].numel)
    }

    /// Calls `f` with the first column, and the values, of every stretch of elements: along a row where columns are strided,
    /// else within one column.
    fn values(&self, score: &dyn Score, scale: f32, f: &mut dyn FnMut(Stretch<'_>)) -> Result<()> {
        let mut scaled = Vec::new();
        let mut out = Vec::new();
        for (block, inputs) in self.blocks.iter().zip(&self.inputs) {
            let owned = inputs.iter().map(|input| {
                let input = input.as_ref().map(|tensor| tensor.f_to_kind(Kind::Float)?.f_to_device(tch::Device::Cpu));
                input.transpose().map_err(Error::from)
            });
            let owned = owned.collect::<Result<Vec<_>>>()?;
            let views = owned.iter().map(|tensor| tensor.as_ref().map_or(Ok(&[][..]), zf_sys::storage::slice::<f32>));
            let views = views.collect::<zf_sys::Result<Vec<_>>>()?;
            for (column, along, part) in block.rows() {
                let of = |input: &'_ [f32]| if input.is_empty() { 0..0 } else { part.clone() };
                scaled.clear();
                scaled.extend(views[0][part.clone()].iter().map(|grad| grad * scale));
                out.resize(part.len(), 0.0);
                let input = ScoreInput {
                    grad: &scaled,
                    weight: &views[1][of(views[1])],
                    second_moment: &views[2][of(views[2])],
                };
                score.map(&input, &mut out);
                f(Stretch { column, along, values: &out });
            }
        }
        Ok(())
    }
}

/// Values of neighbouring elements.
struct Stretch<'a> {
    column: usize,
    /// Whether each value is of the next column, instead of all of one.
    along: bool,
    values: &'a [f32],
}

/// What is not a number matters least, what is infinite most.
#[inline(always)]
#[expect(clippy::manual_clamp, reason = "clamp would let pass what is not a number")]
fn tame(value: f32) -> f32 {
    value.max(0.0).min(f32::MAX)
}

impl Stretch<'_> {
    /// Raises the largest value of each column, or with one element in `tops` of all.
    fn raise(&self, tops: &mut [f32]) {
        if self.along && tops.len() > 1 {
            tops[self.column..].iter_mut().zip(self.values).for_each(|(top, &value)| *top = top.max(tame(value)));
        } else {
            let top = &mut tops[if tops.len() > 1 { self.column } else { 0 }];
            *top = top.max(Level::detect().run(Largest(self.values)));
        }
    }

    /// Adds each value as a multiple of `unit` to its column.
    fn add(&self, unit: f64, sums: &mut [i64]) {
        // Dividing by a power of two is multiplying by another.
        let inverse = 1.0 / unit;
        let sums = if self.along {
            &mut sums[self.column..self.column + self.values.len()]
        } else {
            &mut sums[self.column..=self.column]
        };
        Level::detect().run(Add { values: self.values, inverse, sums });
    }
}

/// The largest of some values.
struct Largest<'a>(&'a [f32]);

impl Kernel for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        const LANES: usize = 16;
        let (head, tail) = self.0.as_chunks::<LANES>();
        let mut tops = [0f32; LANES];
        for chunk in head {
            for (top, &value) in tops.iter_mut().zip(chunk) {
                *top = top.max(tame(value));
            }
        }
        tops.iter().chain(tail).fold(0.0, |top, &value| top.max(tame(value)))
    }
}

/// Adds values to sums: one each, or all to one.
struct Add<'a> {
    values: &'a [f32],
    inverse: f64,
    sums: &'a mut [i64],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { values, inverse, sums } = self;
        if let [sum] = sums {
            *sum += values.iter().map(|&value| multiple(value, inverse)).sum::<i64>();
        } else {
            sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += multiple(value, inverse));
        }
    }
}

/// The nearest multiple, ties to even: added to 1.5 x 2^52, the last bits of the sum are the integer.
#[inline(always)]
fn multiple(value: f32, inverse: f64) -> i64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    (f64::from(tame(value)) * inverse + MAGIC).to_bits() as i64 - MAGIC.to_bits() as i64
}

/// The score of every column of every weight, agreed by all ranks. `scale` unscales and clips gradients.
pub(crate) fn columns(
    weights: &[Weight<'_>],
    score: &dyn Score,
    scale: f32,
    transport: &mut dyn Transport,
) -> Result<Vec<Vec<f64>>> {
    let max = score.reduction() == ScoreReduction::Max;
    let mut largest: Vec<Vec<f32>> = Vec::new();
    for weight in weights {
        let mut tops = vec![0f32; if max { weight.columns() } else { 1 }];
        weight.values(score, scale, &mut |stretch| {
            stretch.raise(&mut tops);
        })?;
        largest.push(tops);
    }
    agree_on_largest(&mut largest, transport)?;
    if max {
        return Ok(largest.into_iter().map(|tops| tops.into_iter().map(f64::from).collect()).collect());
    }
    let mut sums: Vec<i64> = Vec::new();
    for (weight, top) in weights.iter().zip(&largest) {
        let unit = unit(top[0]);
        let first = sums.len();
        sums.resize(first + weight.columns(), 0);
        let sums = &mut sums[first..];
        weight.values(score, scale, &mut |stretch| {
            stretch.add(unit, sums);
        })?;
    }
    let sums = if transport.world() > 1 { add_up(&sums, transport)? } else { sums };
    let mut rest = sums.as_slice();
    let scores = weights.iter().zip(&largest).map(|(weight, top)| {
        let (own, more) = rest.split_at(weight.columns());
        rest = more;
        own.iter().map(|&sum| sum as f64 * unit(top[0])).collect()
    });
    Ok(scores.collect())
}

/// The number of which addends up to `largest` are taken as multiples: a power of two, so that dividing is exact.
fn unit(largest: f32) -> f64 {
    if largest == 0.0 {
        return 1.0;
    }
    let exponent = (f64::from(largest).to_bits() >> 52) as i32 - 1023;
    2f64.powi(exponent - BITS)
}

fn agree_on_largest(largest: &mut [Vec<f32>], transport: &mut dyn Transport) -> Result<()> {
    if transport.world() == 1 {
        return Ok(());
    }
    let mine: Vec<u8> = largest.iter().flatten().flat_map(|top| top.to_le_bytes()).collect();
    for (rank, answer) in transport.exchange("largest scores", mine.clone())?.iter().enumerate() {
        if answer.len() != mine.len() {
            return Err(Error::comm(format!("rank {rank} sent a garbled message of scores")));
        }
        for (top, other) in largest.iter_mut().flatten().zip(answer.as_chunks::<4>().0) {
            *top = top.max(f32::from_le_bytes(*other));
        }
    }
    Ok(())
}

fn add_up(sums: &[i64], transport: &mut dyn Transport) -> Result<Vec<i64>> {
    let tensor = zf_sys::storage::tensor_from(sums, &[i64::try_from(sums.len()).unwrap_or(i64::MAX)])?;
    let request = Request {
        group: Group::world(transport.world()),
        label: "scores of columns".into(),
        collective: Collective::AllReduce { tensor: tensor.shallow_clone(), op: Reduce::Sum },
    };
    transport.issue(request)?.wait()?;
    Ok(zf_sys::storage::slice::<i64>(&tensor)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_a_power_of_two_far_below_the_largest() {
        for largest in [1e-38f32, 1e-3, 0.5, 1.0, 1.999, 3e38] {
            let unit = unit(largest);
            assert_eq!(unit.to_bits() << 12, 0, "{unit} is a power of two");
            let ratio = f64::from(largest) / unit;
            assert!((2f64.powi(40)..2f64.powi(41)).contains(&ratio), "{largest}: {ratio}");
        }
        assert_eq!(unit(0.0), 1.0);
    }

    #[test]
    fn multiples_are_rounded_to_even_and_wild_values_tamed() {
        let nearest = |value: f32| multiple(value, 2.0);
        assert_eq!([0.0, 0.25, 0.75, 1.25, 3.0].map(nearest), [0, 0, 2, 2, 6]);
        assert_eq!(nearest(f32::NAN), 0);
        let unit = unit(f32::MAX);
        assert_eq!(multiple(f32::INFINITY, 1.0 / unit), multiple(f32::MAX, 1.0 / unit));
    }

    #[test]
    fn stretches_raise_and_add_by_column() {
        let values: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let (mut tops, mut one, mut sums) = (vec![5f32; 44], vec![0f32], vec![0i64; 44]);
        let along = Stretch { column: 3, along: true, values: &values };
        along.raise(&mut tops);
        along.raise(&mut one);
        along.add(0.5, &mut sums);
        assert_eq!((tops[2], tops[3], tops[10], tops[42], one[0]), (5.0, 5.0, 7.0, 39.0, 39.0));
        assert_eq!((sums[2], sums[3], sums[42]), (0, 0, 78));
        let down = Stretch { column: 2, along: false, values: &values };
        let (mut tops, mut sums) = (vec![0f32; 5], vec![0i64; 5]);
        down.raise(&mut tops);
        down.add(0.5, &mut sums);
        assert_eq!((tops, sums), (vec![0.0, 0.0, 39.0, 0.0, 0.0], vec![0, 0, 2 * 780, 0, 0]));
    }
}
