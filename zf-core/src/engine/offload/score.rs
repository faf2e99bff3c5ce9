//! The scores of columns, the same bits for every number of ranks and every way of sharding.
//!
//! A column's score is a sum over rows that lie on several ranks. Sums of floating-point numbers depend on where shards end;
//! integers do not: each addend is rounded to a multiple of 2^(E-40), where E is the exponent of the weight's largest value, on
//! which ranks agree first. No gradient is gathered: the ranks exchange one number a weight and one number a column.

use tch::{Kind, Tensor};

use super::columns::{Block, Columns, Shape};
use crate::engine::flat::FlatState;
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

impl Stretch<'_> {
    fn each(&self, mut f: impl FnMut(usize, f32)) {
        for (offset, &value) in self.values.iter().enumerate() {
            // What is not a number matters least, what is infinite most.
            let value = if value.is_nan() { 0.0 } else { value.clamp(0.0, f32::MAX) };
            f(if self.along { self.column + offset } else { self.column }, value);
        }
    }
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
            stretch.each(|column, value| {
                let top = &mut tops[if max { column } else { 0 }];
                *top = top.max(value);
            });
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
            stretch.each(|column, value| sums[column] += (f64::from(value) / unit).round_ties_even() as i64);
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
    use super::unit;

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
}
