//! A collective as one rank brought it: which memory, and what agrees with the other ranks.

use std::ops::Range;

use tch::Tensor;
use zf_core::stage::{Collective, Reduce};

use crate::span::Span;

/// What one member contributes to a collective, checked against itself.
#[derive(Debug)]
pub(crate) enum Work {
    AllReduce { tensor: Span, op: Reduce },
    ReduceScatter { inputs: Vec<Span>, output: Span, accumulate: bool },
    AllGather { input: Span, outputs: Vec<Span> },
    AllToAll { inputs: Vec<Span>, outputs: Vec<Span> },
    Broadcast { tensor: Span, root: usize },
    Exchange { bytes: Vec<u8> },
}

/// The share of member `member` of `size` in `len` elements.
pub(crate) fn share(len: usize, member: usize, size: usize) -> Range<usize> {
    let cut = |at: usize| (len as u128 * at as u128 / size as u128) as usize;
    cut(member)..cut(member + 1)
}

impl Work {
    /// Reads the tensors' addresses, and moves the bytes of an exchange out of `collective`.
    pub(crate) fn of(collective: &mut Collective, member: usize, size: usize) -> Result<Self, String> {
        Ok(match collective {
            Collective::AllReduce { tensor, op } => Self::AllReduce { tensor: Span::of(tensor)?, op: *op },
            Collective::ReduceScatter { inputs, output, accumulate } => {
                let inputs = pieces("inputs", inputs, size)?;
                let output = Span::of(output).map_err(|found| format!("the output is {found}"))?;
                let own = inputs[member];
                if own.len != output.len || !own.dtype.sums_into(output.dtype) {
                    return Err(format!("the own piece has {own}, which does not add into an output of {output}"));
                }
                let others = others(&inputs, member).all(|input| input.apart(&output));
                let own_apart = own.same(&output) || own.apart(&output);
                overlap(others && own_apart, "the output overlaps an input that is not its own piece")?;
                Self::ReduceScatter { inputs, output, accumulate: *accumulate }
            }
            Collective::AllGather { input, outputs } => {
                let input = Span::of(input).map_err(|found| format!("the input is {found}"))?;
                let outputs = pieces("outputs", outputs, size)?;
                let own = outputs[member];
                if own.len != input.len || own.dtype != input.dtype {
                    return Err(format!("the input has {input}, but the output for it {own}"));
                }
                let others = others(&outputs, member).all(|output| output.apart(&input));
                overlap(others && own.same_or_apart(&input), "an output overlaps the input")?;
                Self::AllGather { input, outputs }
            }
            Collective::AllToAll { inputs, outputs } => {
                let inputs = pieces("inputs", inputs, size)?;
                let outputs = pieces("outputs", outputs, size)?;
                let (from, to) = (inputs[member], outputs[member]);
                if from.len != to.len || from.dtype != to.dtype {
                    return Err(format!("the own input has {from}, but the own output {to}"));
                }
                let apart = outputs.iter().enumerate().all(|(at, output)| {
                    inputs.iter().enumerate().all(|(from, input)| {
                        output.apart(input) || (at == member && from == member && output.same(input))
                    })
                });
                overlap(apart, "an output overlaps an input")?;
                Self::AllToAll { inputs, outputs }
            }
            Collective::Broadcast { tensor, root } => {
                if *root >= size {
                    return Err(format!("the root is member {root}, but the group has {size} members"));
                }
                Self::Broadcast { tensor: Span::of(tensor)?, root: *root }
            }
            Collective::Exchange { bytes } => Self::Exchange { bytes: std::mem::take(bytes) },
        })
    }

    /// Whether this contribution of member `a` fits that of member `b`: what both have, if not.
    pub(crate) fn agrees(&self, a: usize, other: &Self, b: usize) -> Result<(), (String, String)> {
        let same = |fits: bool, ours: String, theirs: String| if fits { Ok(()) } else { Err((ours, theirs)) };
        let spans = |ours: &Span, theirs: &Span, what: &str| {
            same(
                ours.len == theirs.len && ours.dtype == theirs.dtype,
                format!("{ours}{what}"),
                format!("{theirs}{what}"),
            )
        };
        match (self, other) {
            (Self::AllReduce { tensor: x, op: p }, Self::AllReduce { tensor: y, op: q }) => {
                same(p == q, format!("{p:?}"), format!("{q:?}"))?;
                spans(x, y, "")
            }
            (Self::ReduceScatter { inputs: x, .. }, Self::ReduceScatter { inputs: y, .. }) => {
                x.iter().zip(y).enumerate().try_for_each(|(piece, (x, y))| spans(x, y, &format!(" for piece {piece}")))
            }
            (Self::AllGather { input: from_a, outputs: to_a }, Self::AllGather { input: from_b, outputs: to_b }) => {
                spans(from_a, &to_b[a], &format!(" for piece {a}"))?;
                spans(&to_a[b], from_b, &format!(" for piece {b}"))
            }
            (Self::AllToAll { inputs: from_a, outputs: to_a }, Self::AllToAll { inputs: from_b, outputs: to_b }) => {
                spans(&from_a[b], &to_b[a], &format!(" from member {a} to {b}"))?;
                spans(&to_a[b], &from_b[a], &format!(" from member {b} to {a}"))
            }
            (Self::Broadcast { tensor: x, root: p }, Self::Broadcast { tensor: y, root: q }) => {
                same(p == q, format!("root {p}"), format!("root {q}"))?;
                spans(x, y, "")
            }
            _ => Ok(()),
        }
    }

    /// Bytes of this rank's memory that the collective touches.
    pub(crate) fn bytes(&self) -> usize {
        let sum = |spans: &[Span]| spans.iter().map(Span::bytes).sum::<usize>();
        match self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } => tensor.bytes(),
            Self::ReduceScatter { inputs, output, .. } => sum(inputs) + output.bytes(),
            Self::AllGather { input, outputs } => input.bytes() + sum(outputs),
            Self::AllToAll { inputs, outputs } => sum(inputs) + sum(outputs),
            Self::Exchange { bytes } => bytes.len(),
        }
    }

    /// Whether a group of one has nothing to do: the result lies where it should.
    pub(crate) fn is_done_alone(&self) -> bool {
        match self {
            Self::AllReduce { .. } | Self::Broadcast { .. } | Self::Exchange { .. } => true,
            Self::ReduceScatter { inputs, output, accumulate } => {
                output.len == 0 || (!accumulate && inputs[0].same(output))
            }
            Self::AllGather { input, outputs } => outputs[0].len == 0 || outputs[0].same(input),
            Self::AllToAll { inputs, outputs } => outputs[0].len == 0 || outputs[0].same(&inputs[0]),
        }
    }
}

/// One span for each member, all of one dtype.
fn pieces(what: &str, tensors: &[Tensor], size: usize) -> Result<Vec<Span>, String> {
    if tensors.len() != size {
        return Err(format!("{} {what} for a group of {size} members", tensors.len()));
    }
    let spans = tensors
        .iter()
        .enumerate()
        .map(|(at, tensor)| Span::of(tensor).map_err(|found| format!("piece {at} of the {what} is {found}")))
        .collect::<Result<Vec<_>, _>>()?;
    match spans.iter().position(|span| span.dtype != spans[0].dtype) {
        Some(at) => Err(format!("piece 0 of the {what} is {}, piece {at} {}", spans[0].dtype, spans[at].dtype)),
        None => Ok(spans),
    }
}

fn others(spans: &[Span], member: usize) -> impl Iterator<Item = &Span> {
    spans.iter().enumerate().filter(move |(at, _)| *at != member).map(|(_, span)| span)
}

fn overlap(apart: bool, message: &str) -> Result<(), String> {
    if apart { Ok(()) } else { Err(message.into()) }
}
