//! How each collective moves its data, by messages and sums of our own, so that they are the same bits as between threads.
//!
//! Every byte crosses a link once where that is possible at all: reduce-scatter sends each piece to its owner, which adds
//! in the order of members; all-reduce is that and an all-gather of the shares; a broadcast cuts the tensor into shares,
//! which the members pass on to each other.

use tch::{Device, Kind, Tensor};
use zf_core::stage::{Collective, Group, Reduce};

use super::courier::{Courier, Parcel, Trouble, wait_all};
use super::envelope::{self, Envelope, Extent, INLINE};
use crate::kernel;
use crate::span::Span;
use crate::work::{Work, share};

const ENVELOPE: u16 = 0;
const DATA: u16 = 1;
/// Bytes of all chunks that are received while the ones before are added.
const WINDOW: usize = 4 << 20;
const SMALLEST_CHUNK: usize = 64 << 10;

/// The envelopes from and to each member, and space for what is added.
pub(crate) struct Desk {
    incoming: Vec<Tensor>,
    outgoing: Vec<Tensor>,
    scratch: Tensor,
}

impl Desk {
    /// For a group of `size` members.
    pub(crate) fn new(size: usize) -> Result<Self, Trouble> {
        let envelopes = || (0..size).map(|_| bytes(envelope::SIZE)).collect::<Result<Vec<_>, _>>();
        Ok(Self { incoming: envelopes()?, outgoing: envelopes()?, scratch: bytes(0)? })
    }

    /// What came in the envelope of `member`.
    fn arrived(&self, member: usize, extent: Extent) -> Result<Span, Trouble> {
        let span = Span::of(&self.incoming[member]).map_err(Trouble::Failed)?;
        let place = span.part(&Envelope::data(extent.len * extent.dtype.bytes()));
        Ok(Span { data: place.data, len: extent.len, dtype: extent.dtype })
    }

    /// Space for `len` bytes.
    fn scratch(&mut self, len: usize) -> Result<&Tensor, Trouble> {
        if self.scratch.numel() < len {
            self.scratch = bytes(len)?;
        }
        Ok(&self.scratch)
    }
}

/// Tells every member what this one is about to do, and learns the same of them.
///
/// # Errors
/// [`Trouble::Conflict`] with what two members have, where they do not fit.
pub(crate) fn agree(
    courier: &Courier,
    desk: &Desk,
    work: &Work,
    label: &str,
    sequence: u64,
    group: &Group,
) -> Result<Vec<Option<Envelope>>, Trouble> {
    let mut parcels = Vec::new();
    for peer in courier.peers() {
        parcels.push((peer, courier.recv(peer, &desk.incoming[peer], ENVELOPE)?));
    }
    let mut ours = vec![None; courier.group.size()];
    let mut sent = Vec::new();
    for peer in courier.peers() {
        let envelope = Envelope::new(work, label, sequence, courier.me, peer);
        // SAFETY: this thread alone uses the desk, and the sends of the collective before are complete.
        let place = unsafe { zf_sys::storage::slice_mut::<u8>(&desk.outgoing[peer]) };
        let place = place.map_err(|error| Trouble::Failed(error.to_string()))?;
        envelope.write(place);
        if let Some(data) = small(work, peer, courier.me) {
            // SAFETY: the caller's tensors live and are left alone during the collective, and the data fit.
            unsafe {
                std::ptr::copy_nonoverlapping(data.0, place[Envelope::data(data.1)].as_mut_ptr(), data.1);
            }
        }
        sent.push(courier.send(peer, &desk.outgoing[peer], ENVELOPE)?);
        ours[peer] = Some(envelope);
    }
    let mut theirs = vec![None; courier.group.size()];
    for (peer, parcel) in parcels {
        parcel.wait()?;
        let read = zf_sys::storage::slice::<u8>(&desk.incoming[peer]).ok().and_then(Envelope::read);
        let Some(envelope) = read else {
            return Err(Trouble::Failed(format!(
                "rank {} sent something that is no collective; all ranks must run the same program",
                group.ranks()[peer]
            )));
        };
        if let Some(text) = ours[peer].as_ref().and_then(|mine| mine.conflict(courier.me, &envelope, peer, group)) {
            return Err(Trouble::Conflict(text));
        }
        theirs[peer] = Some(envelope);
    }
    wait_all(&sent)?;
    Ok(theirs)
}

/// What goes to `peer` in the envelope: address and bytes.
fn small(work: &Work, peer: usize, me: usize) -> Option<(*const u8, usize)> {
    let span = match work {
        Work::Exchange { bytes } => {
            return (1..=INLINE).contains(&bytes.len()).then_some((bytes.as_ptr(), bytes.len()));
        }
        Work::Broadcast { root, .. } if *root != me => return None,
        Work::AllReduce { tensor, .. } | Work::Broadcast { tensor, .. } => tensor,
        Work::ReduceScatter { inputs, .. } | Work::AllToAll { inputs, .. } => &inputs[peer],
        Work::AllGather { input, .. } => input,
    };
    (1..=INLINE).contains(&span.bytes()).then(|| (span.data.cast_const(), span.bytes()))
}

/// Moves the data of a collective whose members agree; the bytes of all members for an exchange.
pub(crate) fn run(
    courier: &Courier,
    desk: &mut Desk,
    work: &Work,
    tensors: &Collective,
    theirs: &[Option<Envelope>],
) -> Result<Vec<Vec<u8>>, Trouble> {
    match (work, tensors) {
        (Work::AllReduce { tensor: span, op }, Collective::AllReduce { tensor, .. }) => {
            all_reduce(courier, desk, span, tensor, *op)?;
        }
        (Work::ReduceScatter { inputs, output, accumulate }, Collective::ReduceScatter { inputs: tensors, .. }) => {
            let sums = Sums { own: inputs[courier.me], outputs: &[*output], op: Reduce::Sum, accumulate: *accumulate };
            let pieces: Vec<_> = tensors.iter().collect();
            reduce_scatter(courier, desk, &pieces, &sums, true)?;
        }
        (Work::AllGather { input: own, outputs: spans }, Collective::AllGather { input, outputs }) => {
            let inputs: Vec<_> = outputs.iter().map(|_| input).collect();
            all_to_all(courier, desk, &inputs, own, outputs, spans)?;
        }
        (Work::AllToAll { inputs: from, outputs: spans }, Collective::AllToAll { inputs, outputs }) => {
            let tensors: Vec<_> = inputs.iter().collect();
            all_to_all(courier, desk, &tensors, &from[courier.me], outputs, spans)?;
        }
        (Work::Broadcast { tensor: span, root }, Collective::Broadcast { tensor, .. }) => {
            broadcast(courier, desk, span, tensor, *root)?;
        }
        (Work::Exchange { bytes }, _) => return exchange(courier, desk, bytes, theirs),
        _ => return Err(Trouble::Failed("a collective changed after it was issued".into())),
    }
    Ok(Vec::new())
}

/// What becomes of the pieces for this member.
struct Sums<'a> {
    own: Span,
    outputs: &'a [Span],
    op: Reduce,
    accumulate: bool,
}

impl Sums<'_> {
    /// Adds one chunk, whose part from each member is given by `arrived`.
    fn add(
        &self,
        size: usize,
        me: usize,
        range: &std::ops::Range<usize>,
        arrived: impl Fn(usize) -> Result<Span, Trouble>,
    ) -> Result<(), Trouble> {
        let addends = (0..size)
            .map(|member| if member == me { Ok(self.own.part(range)) } else { arrived(member) })
            .collect::<Result<Vec<_>, _>>()?;
        let outputs: Vec<_> = self.outputs.iter().map(|output| output.part(range)).collect();
        // SAFETY: lengths and dtypes were checked; what arrived lies in memory of this line, and the caller's tensors
        // live and are left alone during the collective. An output is at most the same memory as the own piece, which
        // goes to nobody.
        unsafe { kernel::combine(&addends, &outputs, self.op, self.accumulate) }
        Ok(())
    }
}

/// Sends every piece to its owner in chunks, and adds the chunks for this member while the next ones arrive. With
/// `enveloped`, pieces that fit have travelled in the envelopes.
fn reduce_scatter(
    courier: &Courier,
    desk: &mut Desk,
    pieces: &[&Tensor],
    sums: &Sums,
    enveloped: bool,
) -> Result<(), Trouble> {
    let (me, size) = (courier.me, courier.group.size());
    let own = Extent { len: sums.own.len, dtype: sums.own.dtype };
    let element = own.dtype.bytes();
    let chunk = (WINDOW / size).max(SMALLEST_CHUNK) / element;
    let chunks = |len: usize| (0..len.div_ceil(chunk)).map(move |at| at * chunk..len.min((at + 1) * chunk));
    let over = |extent: Extent| extent.len == 0 || (enveloped && extent.is_inline());
    let mut sent = Vec::new();
    for peer in courier.peers() {
        let extent = Extent { len: pieces[peer].numel(), dtype: own.dtype };
        if !over(extent) {
            for range in chunks(extent.len) {
                sent.push(courier.send(peer, &part(pieces[peer], &range)?, DATA)?);
            }
        }
    }
    if over(own) {
        sums.add(size, me, &(0..own.len), |member| desk.arrived(member, own))?;
        return wait_all(&sent);
    }
    // Two chunks of each member: one arrives while the other is added.
    let stride = (chunk.min(own.len) * element).next_multiple_of(64);
    let scratch = desk.scratch(2 * size * stride)?;
    let place = |at: usize, member: usize| ((at % 2) * size + member) * stride;
    let start = |at: usize, range: &std::ops::Range<usize>| -> Result<Vec<Parcel>, Trouble> {
        courier
            .peers()
            .map(|peer| {
                let begin = place(at, peer);
                courier.recv(peer, &part(scratch, &(begin..begin + range.len() * element))?, DATA)
            })
            .collect()
    };
    let space = Span::of(scratch).map_err(Trouble::Failed)?;
    let ranges: Vec<_> = chunks(own.len).collect();
    let mut arriving = start(0, &ranges[0])?;
    for (at, range) in ranges.iter().enumerate() {
        wait_all(&arriving)?;
        if let Some(next) = ranges.get(at + 1) {
            arriving = start(at + 1, next)?;
        }
        sums.add(size, me, range, |member| {
            let bytes = space.part(&(place(at, member)..place(at, member) + range.len() * element));
            Ok(Span { data: bytes.data, len: range.len(), dtype: own.dtype })
        })?;
    }
    wait_all(&sent)
}

/// Sends `inputs[m]` to member m, and receives into `outputs[m]` what it has for this one; `own` stays here.
fn all_to_all(
    courier: &Courier,
    desk: &Desk,
    inputs: &[&Tensor],
    own: &Span,
    outputs: &[Tensor],
    spans: &[Span],
) -> Result<(), Trouble> {
    let mut parcels = Vec::new();
    for peer in courier.peers() {
        let extent = Extent { len: spans[peer].len, dtype: spans[peer].dtype };
        if extent.is_inline() {
            let arrived = desk.arrived(peer, extent)?;
            // SAFETY: length and dtype agree; the output is this member's and left alone by others.
            unsafe { spans[peer].copy_from(&arrived) }
        } else {
            parcels.push(courier.recv(peer, &outputs[peer], DATA)?);
        }
    }
    for peer in courier.peers() {
        let extent = Extent { len: inputs[peer].numel(), dtype: own.dtype };
        if !extent.is_inline() {
            parcels.push(courier.send(peer, inputs[peer], DATA)?);
        }
    }
    // SAFETY: both are this member's, of the same length and dtype, and the same memory or apart.
    unsafe { spans[courier.me].copy_from(own) }
    wait_all(&parcels)
}

fn all_reduce(courier: &Courier, desk: &mut Desk, span: &Span, tensor: &Tensor, op: Reduce) -> Result<(), Trouble> {
    let (me, size) = (courier.me, courier.group.size());
    let extent = Extent { len: span.len, dtype: span.dtype };
    if extent.is_inline() {
        let sums = Sums { own: *span, outputs: &[*span], op, accumulate: false };
        return sums.add(size, me, &(0..span.len), |member| desk.arrived(member, extent));
    }
    let shares: Vec<_> = (0..size).map(|member| share(span.len, member, size)).collect();
    let tensors = shares.iter().map(|range| part(tensor, range)).collect::<Result<Vec<_>, _>>()?;
    let own = span.part(&shares[me]);
    let pieces: Vec<_> = tensors.iter().collect();
    reduce_scatter(courier, desk, &pieces, &Sums { own, outputs: &[own], op, accumulate: false }, false)?;
    let mut parcels = Vec::new();
    for peer in courier.peers().filter(|peer| !shares[*peer].is_empty()) {
        parcels.push(courier.recv(peer, &tensors[peer], DATA)?);
    }
    for peer in courier.peers().filter(|_| own.len > 0) {
        parcels.push(courier.send(peer, &tensors[me], DATA)?);
    }
    wait_all(&parcels)
}

/// In shares, so that the root sends the tensor not once for each member, but twice in all.
fn broadcast(courier: &Courier, desk: &Desk, span: &Span, tensor: &Tensor, root: usize) -> Result<(), Trouble> {
    let (me, size) = (courier.me, courier.group.size());
    let extent = Extent { len: span.len, dtype: span.dtype };
    if extent.is_inline() {
        if me != root {
            // SAFETY: length and dtype agree; the tensor is this member's and left alone by others.
            unsafe { span.copy_from(&desk.arrived(root, extent)?) }
        }
        return Ok(());
    }
    let shares = (0..size).map(|member| part(tensor, &share(span.len, member, size)));
    let shares = shares.collect::<Result<Vec<_>, _>>()?;
    let mut parcels = Vec::new();
    if me == root {
        for peer in courier.peers() {
            // First what the others wait for too.
            parcels.push(courier.send(peer, &shares[peer], DATA)?);
            parcels.push(courier.send(peer, &shares[root], DATA)?);
        }
        return wait_all(&parcels);
    }
    let mine = courier.recv(root, &shares[me], DATA)?;
    parcels.push(courier.recv(root, &shares[root], DATA)?);
    for peer in courier.peers().filter(|peer| *peer != root) {
        parcels.push(courier.recv(peer, &shares[peer], DATA)?);
    }
    mine.wait()?;
    for peer in courier.peers().filter(|peer| *peer != root) {
        parcels.push(courier.send(peer, &shares[me], DATA)?);
    }
    wait_all(&parcels)
}

fn exchange(courier: &Courier, desk: &Desk, own: &[u8], theirs: &[Option<Envelope>]) -> Result<Vec<Vec<u8>>, Trouble> {
    let mut blobs = vec![Vec::new(); courier.group.size()];
    let mut parcels = Vec::new();
    for (peer, envelope) in theirs.iter().enumerate() {
        let Some(Envelope { sends, .. }) = envelope else { continue };
        if sends.is_inline() {
            let arrived = zf_sys::storage::slice::<u8>(&desk.incoming[peer]);
            let arrived = arrived.map_err(|error| Trouble::Failed(error.to_string()))?;
            blobs[peer] = arrived[Envelope::data(sends.len)].to_vec();
        } else {
            let space = bytes(sends.len)?;
            parcels.push((peer, courier.recv(peer, &space, DATA)?, space));
        }
    }
    let mut sent = Vec::new();
    if own.len() > INLINE {
        let tensor = zf_sys::storage::tensor_from(own, &[own.len() as i64]);
        let tensor = tensor.map_err(|error| Trouble::Failed(error.to_string()))?;
        for peer in courier.peers() {
            sent.push(courier.send(peer, &tensor, DATA)?);
        }
    }
    for (peer, parcel, space) in parcels {
        parcel.wait()?;
        let arrived = zf_sys::storage::slice::<u8>(&space).map_err(|error| Trouble::Failed(error.to_string()))?;
        blobs[peer] = arrived.to_vec();
    }
    blobs[courier.me] = own.to_vec();
    wait_all(&sent)?;
    Ok(blobs)
}

fn part(tensor: &Tensor, range: &std::ops::Range<usize>) -> Result<Tensor, Trouble> {
    let part = tensor.f_narrow(0, range.start as i64, range.len() as i64);
    part.map_err(|error| Trouble::Failed(error.to_string()))
}

fn bytes(len: usize) -> Result<Tensor, Trouble> {
    let tensor = Tensor::f_zeros([len as i64], (Kind::Uint8, Device::Cpu));
    tensor.map_err(|error| Trouble::Failed(format!("no memory for messages: {error}")))
}
