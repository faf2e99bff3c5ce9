//! The bytes that a collective costs, by the formulas of a ring.

use tch::Tensor;
use zf_core::stage::Collective;

use crate::work::share;

/// The bytes that member `member` of `size` would send in a ring, as `CommBytes` counts them. Where pieces differ, a
/// member sends all but its own, so that the sum over members is exact.
pub(crate) fn ring_bytes(collective: &Collective, member: usize, size: usize) -> u64 {
    let all_but_own = |pieces: &[Tensor]| -> usize {
        let others = pieces.iter().enumerate().filter(|(at, _)| *at != member);
        others.map(|(_, piece)| piece.numel() * element_bytes(piece)).sum()
    };
    let all_but_share = |tensor: &Tensor| {
        let len = tensor.numel();
        (len - share(len, member, size).len()) * element_bytes(tensor)
    };
    let bytes = match collective {
        Collective::AllReduce { tensor, .. } => 2 * all_but_share(tensor),
        Collective::ReduceScatter { inputs, .. } => all_but_own(inputs),
        Collective::AllGather { outputs, .. } => all_but_own(outputs),
        Collective::AllToAll { inputs, .. } => all_but_own(inputs),
        Collective::Broadcast { tensor, .. } => all_but_share(tensor),
        Collective::Exchange { bytes } => bytes.len() * size.saturating_sub(1),
    };
    bytes as u64
}

/// Zero for what no transport would send.
fn element_bytes(tensor: &Tensor) -> usize {
    if !tensor.defined() {
        return 0;
    }
    tensor.f_kind().map_or(0, |kind| kind.elt_size_in_bytes())
}
