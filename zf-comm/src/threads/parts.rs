//! What each rank does in a collective: it writes its own results, reading the others' memory where it lies.

use super::meeting::Part;
use crate::kernel;
use crate::span::Span;
use crate::work::{Work, share};

/// Does the part of `member` in a collective whose members all agree.
///
/// Parts of different members may run at the same time: each writes memory that no other part touches.
pub(crate) fn run(parts: &[Part], member: usize) {
    match &parts[member].work {
        Work::AllReduce { tensor, op } => {
            // A share of the elements, written to every member's tensor: the same bits everywhere, no second step.
            let range = share(tensor.len, member, parts.len());
            let all = collect(parts, |work| match work {
                Work::AllReduce { tensor, .. } => Some(tensor.part(&range)),
                _ => None,
            });
            if all.len() > 1 {
                // SAFETY: the tensors were checked and agree, their owners leave them alone until the meeting is
                // settled, and shares of different members are disjoint.
                unsafe { kernel::combine(&all, &all, *op, false) }
            }
        }
        Work::ReduceScatter { output, accumulate, .. } => {
            let addends = collect(parts, |work| match work {
                Work::ReduceScatter { inputs, .. } => Some(inputs[member]),
                _ => None,
            });
            let in_place = parts.len() == 1 && !accumulate && addends[0].same(output);
            if !in_place {
                // SAFETY: as above; the output is this member's alone and overlaps at most its own piece, which only
                // this part reads.
                unsafe { kernel::combine(&addends, &[*output], zf_core::stage::Reduce::Sum, *accumulate) }
            }
        }
        Work::AllGather { outputs, .. } => {
            let inputs = collect(parts, |work| match work {
                Work::AllGather { input, .. } => Some(*input),
                _ => None,
            });
            copy(outputs, &inputs);
        }
        Work::AllToAll { outputs, .. } => {
            let inputs = collect(parts, |work| match work {
                Work::AllToAll { inputs, .. } => Some(inputs[member]),
                _ => None,
            });
            copy(outputs, &inputs);
        }
        Work::Broadcast { tensor, root } => {
            if let Work::Broadcast { tensor: source, .. } = &parts[*root].work {
                copy(&[*tensor], &[*source]);
            }
        }
        Work::Exchange { .. } => {}
    }
}

fn collect(parts: &[Part], span: impl Fn(&Work) -> Option<Span>) -> Vec<Span> {
    parts.iter().filter_map(|part| span(&part.work)).collect()
}

fn copy(outputs: &[Span], inputs: &[Span]) {
    for (output, input) in outputs.iter().zip(inputs) {
        // SAFETY: lengths and dtypes agree, the owners leave the tensors alone until the meeting is settled, and
        // outputs are this member's alone.
        unsafe { output.copy_from(input) }
    }
}
