//! A heap of fixed size against a model of first-fit placement: every block lies where the model says.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use zf_sys::heap::{ByCategory, Category, Heap, tag};

const HEADER: usize = 64;

#[derive(Clone, Debug)]
enum Action {
    Allocate(usize, usize),
    Free(usize),
    Retag(usize, usize),
    ResetPeak,
}

fn action() -> impl Strategy<Value = Action> {
    let size = prop_oneof![4 => 1_usize..300, 4 => 1_usize..5000, 1 => 1_usize..60_000];
    prop_oneof![
        8 => (0_usize..6, size).prop_map(|(category, bytes)| Action::Allocate(category, bytes)),
        6 => any::<usize>().prop_map(Action::Free),
        1 => (any::<usize>(), 0_usize..6).prop_map(|(which, category)| Action::Retag(which, category)),
        1 => Just(Action::ResetPeak),
    ]
}

/// A block: where its data begin and what its chunk spans, header included.
struct Block {
    start: usize,
    span: usize,
    category: usize,
    tensor: Tensor,
    fill: u8,
}

/// The gaps between blocks, in order: start and length.
fn gaps(blocks: &[Block], size: usize) -> Vec<(usize, usize)> {
    let mut gaps = Vec::new();
    let mut at = 0;
    for block in blocks {
        if block.start - HEADER > at {
            gaps.push((at, block.start - HEADER - at));
        }
        at = block.start - HEADER + block.span;
    }
    if at < size {
        gaps.push((at, size - at));
    }
    gaps
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_first_fit(actions in proptest::collection::vec(action(), 1..150), size in 4096_usize..100_000) {
        let heap = Heap::with_limit("model", size).unwrap();
        let size = size / 64 * 64;
        let _inside = heap.enter();
        let base = {
            let probe = Tensor::f_empty([1], (Kind::Uint8, Device::Cpu)).unwrap();
            probe.data_ptr() as usize - HEADER
        };
        heap.reset_peak();
        // In the order of addresses.
        let mut blocks: Vec<Block> = Vec::new();
        let (mut live, mut peak, mut refused, mut fill) = (ByCategory::default(), 0, 0, 0_u8);
        for action in actions {
            match action {
                Action::Allocate(category, bytes) => {
                    let _tag = tag(Category::ALL[category]);
                    let wanted = bytes.div_ceil(64) * 64 + HEADER;
                    let found = gaps(&blocks, size).into_iter().find(|(_, length)| *length >= wanted);
                    let made = Tensor::f_empty([bytes as i64], (Kind::Uint8, Device::Cpu));
                    prop_assert_eq!(made.is_ok(), found.is_some());
                    let (Some((start, length)), Ok(mut tensor)) = (found, made) else {
                        refused += 1;
                        let refusal = heap.last_refusal().unwrap().unwrap();
                        prop_assert_eq!((refusal.number, refusal.asked), (refused, bytes as i64));
                        prop_assert_eq!((refusal.live, Some(refusal.room)), (live, heap.room()));
                        continue;
                    };
                    prop_assert_eq!(tensor.data_ptr() as usize, base + start + HEADER);
                    // A rest of one header has no room for data and stays with the block.
                    let span = if length - wanted <= HEADER { length } else { wanted };
                    fill = fill.wrapping_add(1);
                    let _ = tensor.f_fill_(i64::from(fill)).unwrap();
                    live.0[category] += bytes as i64;
                    blocks.push(Block { start: start + HEADER, span, category, tensor, fill });
                    blocks.sort_by_key(|block| block.start);
                }
                Action::Free(which) if !blocks.is_empty() => {
                    let block = blocks.remove(which % blocks.len());
                    let bytes = zf_sys::storage::slice::<u8>(&block.tensor).unwrap();
                    prop_assert!(bytes.iter().all(|byte| *byte == block.fill), "a block was overwritten");
                    live.0[block.category] -= bytes.len() as i64;
                }
                Action::Retag(which, category) if !blocks.is_empty() => {
                    let which = which % blocks.len();
                    let bytes = blocks[which].tensor.size()[0];
                    zf_sys::heap::retag(&blocks[which].tensor, Category::ALL[category]).unwrap();
                    live.0[blocks[which].category] -= bytes;
                    live.0[category] += bytes;
                    blocks[which].category = category;
                }
                Action::Free(_) | Action::Retag(..) => {}
                Action::ResetPeak => {
                    heap.reset_peak();
                    peak = live.total();
                }
            }
            peak = peak.max(live.total());
            let stats = heap.stats();
            prop_assert_eq!((stats.live, stats.peak, stats.cached), (live, peak, 0));
            let gaps: Vec<i64> = gaps(&blocks, size).iter().map(|(_, length)| (length - HEADER) as i64).collect();
            let room = stats.room.unwrap();
            prop_assert_eq!(room.size, size as i64);
            prop_assert_eq!(room.free, gaps.iter().sum::<i64>());
            prop_assert_eq!(room.largest_free, gaps.iter().copied().max().unwrap_or(0));
        }
        drop(blocks);
        prop_assert_eq!(heap.stats().live, ByCategory::default());
        prop_assert_eq!(heap.room().unwrap().largest_free, (size - HEADER) as i64);
    }
}
