//! The heap follows the rank to the threads on which libtorch runs its work.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};
use zf_sys::autograd::{backward, on_output_grad};
use zf_sys::heap::{Category, Heap, tag};

use crate::{F32, leaf};

/// What the innermost of nested backward passes sees.
#[derive(Clone)]
struct Depth {
    levels: usize,
    heap: Heap,
    kept: Arc<Mutex<Vec<Tensor>>>,
    seen: Arc<Mutex<Vec<(ThreadId, i64)>>>,
}

/// Runs a backward pass whose hook runs another one, `levels` deep; each allocates a tensor that is kept.
fn nest(depth: Depth) -> Result<(), String> {
    // A hook runs without recording.
    tch::with_grad(|| nest_recording(depth))
}

fn nest_recording(depth: Depth) -> Result<(), String> {
    let text = |error: tch::TchError| error.to_string();
    let kept = Tensor::f_zeros([1000], F32).map_err(text)?;
    depth.kept.lock().unwrap().push(kept);
    let gradients = {
        let _tag = tag(Category::Gradients);
        Tensor::f_zeros([10], F32).map_err(text)?
    };
    depth.kept.lock().unwrap().push(gradients);
    let live = depth.heap.stats().live[Category::Activations];
    depth.seen.lock().unwrap().push((thread::current().id(), live));
    if depth.levels == 0 {
        return Ok(());
    }
    let x = leaf(&[4], 0.0);
    let y = x.f_sin().map_err(text)?;
    let inner = Depth { levels: depth.levels - 1, ..depth };
    on_output_grad(&y, Box::new(move || nest(inner.clone()))).map_err(|error| error.to_string())?;
    backward(&[y.f_sum(Kind::Float).map_err(text)?], &[None], false).map_err(|error| error.to_string())
}

/// libtorch moves a backward pass to another thread when 60 are nested.
const LEVELS: usize = 70;

#[test]
fn nested_backward_on_another_thread_is_booked_to_the_heap_and_category_of_its_caller() {
    for heap in [Heap::new("free").unwrap(), Heap::with_limit("fixed", 4 << 20).unwrap()] {
        let depth = Depth { levels: LEVELS, heap: heap.clone(), kept: Arc::default(), seen: Arc::default() };
        {
            let _inside = heap.enter();
            let _tag = tag(Category::Activations);
            nest(depth.clone()).unwrap();
        }
        let seen = std::mem::take(&mut *depth.seen.lock().unwrap());
        assert_eq!(seen.len(), LEVELS + 1);
        let here = thread::current().id();
        assert!(seen.iter().any(|(id, _)| *id != here), "every pass ran on this thread");
        for (level, pair) in seen.windows(2).enumerate() {
            assert!(pair[1].1 >= pair[0].1 + 4000, "level {level}: {} then {} bytes", pair[0].1, pair[1].1);
        }
        depth.kept.lock().unwrap().clear();
        emptied(&heap);
    }
}

/// The other thread may still be letting go of its last task.
fn emptied(heap: &Heap) {
    let end = Instant::now() + Duration::from_secs(20);
    while heap.stats().live.total() > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(heap.stats().live.total(), 0, "{heap:?}");
}

#[test]
fn a_refusal_on_another_thread_comes_back_as_the_error() {
    let heap = Heap::with_limit("deep", 64 << 10).unwrap();
    let depth = Depth { levels: LEVELS, heap: heap.clone(), kept: Arc::default(), seen: Arc::default() };
    let _inside = heap.enter();
    // Each level keeps 4000 bytes, so that the heap is full after a few.
    let error = nest(depth.clone()).unwrap_err();
    assert!(error.contains(&heap.last_refusal().unwrap().unwrap().message), "{error}");
    assert!(depth.seen.lock().unwrap().len() < 20);
    depth.kept.lock().unwrap().clear();
    emptied(&heap);
}

#[test]
fn a_thread_that_leaves_its_heap_books_nothing_there() {
    let heap = Heap::new("left").unwrap();
    {
        let _inside = heap.enter();
        let _tag = tag(Category::Buffers);
    }
    let _elsewhere = Tensor::f_zeros([10], F32).unwrap();
    assert_eq!(heap.stats().peak, 0);
}
