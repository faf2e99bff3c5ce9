//! The best of many columns.

use std::cmp::Ordering;

/// How many of so many columns a ratio allows: `max(1, floor(ratio x columns))`, at most all.
///
/// A ratio is a decimal number that binary ones only come near, so that 0.29 x 100 is a little less than 29; what misses a
/// whole number by less than 1e-9 counts as that number.
///
/// ```
/// assert_eq!(zf_select::capacity(0.29, 100), 29);
/// assert_eq!(zf_select::capacity(0.1, 5), 1);
/// ```
pub fn capacity(ratio: f64, columns: usize) -> usize {
    let floor = (ratio * columns as f64 + 1e-9).floor() as usize;
    floor.max(1).min(columns)
}

/// The indices of the `count` highest scores, ascending. Among equal ones the lower index goes first; NaN is lower than
/// any number. Takes time in proportion to the number of scores.
///
/// ```
/// assert_eq!(zf_select::highest(&[1.0, 5.0, f64::NAN, 5.0, 9.0], 2), [1, 4]);
/// ```
pub fn highest(scores: &[f64], count: usize) -> Vec<u32> {
    let mut columns: Vec<u32> = (0..).take(scores.len()).collect();
    if count < columns.len() {
        if 0 < count {
            columns.select_nth_unstable_by(count - 1, |&a, &b| better(scores, a, b));
        }
        columns.truncate(count);
    }
    columns.sort_unstable();
    columns
}

/// All indices, the best first, in the order of [`highest`].
pub(crate) fn ranked(scores: &[f64]) -> Vec<u32> {
    let mut columns: Vec<u32> = (0..).take(scores.len()).collect();
    columns.sort_unstable_by(|&a, &b| better(scores, a, b));
    columns
}

/// Whether column `a` goes before column `b`: a total order, so that the result depends on no algorithm.
fn better(scores: &[f64], a: u32, b: u32) -> Ordering {
    let key = |column: u32| {
        let score = scores[column as usize];
        // Adding 0 makes -0 into 0, which `total_cmp` would tell apart.
        if score.is_nan() { f64::NEG_INFINITY } else { score + 0.0 }
    };
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities() {
        for (ratio, columns, expected) in [
            (0.1, 10, 1),
            (0.3, 10, 3),
            (0.7, 10, 7),
            (0.29, 100, 29),
            (0.57, 100, 57),
            (0.1, 9, 1),
            (0.1, 19, 1),
            (0.1, 4095, 409),
            (0.1, 4096, 409),
            (0.05, 11008, 550),
            (1.0, 7, 7),
            (1e-12, 7, 1),
            (1.0, 4_194_304, 4_194_304),
        ] {
            assert_eq!(capacity(ratio, columns), expected, "{ratio} of {columns}");
        }
    }

    #[test]
    fn every_ratio_of_two_places_and_whole_result() {
        for percent in 1..=100_usize {
            for hundreds in [1, 7, 41, 100_usize] {
                assert_eq!(capacity(percent as f64 / 100.0, 100 * hundreds), percent * hundreds);
            }
        }
    }

    #[test]
    fn highest_of_special_numbers() {
        let scores = [f64::NAN, 0.0, -0.0, f64::INFINITY, f64::NAN, 1e-300];
        for (count, expected) in [
            (0, vec![]),
            (1, vec![3]),
            (2, vec![3, 5]),
            (3, vec![1, 3, 5]),
            (4, vec![1, 2, 3, 5]),
            (5, vec![0, 1, 2, 3, 5]),
        ] {
            assert_eq!(highest(&scores, count), expected, "{count}");
        }
        assert_eq!(highest(&scores, 99).len(), 6);
        assert_eq!(highest(&[], 3), Vec::<u32>::new());
        assert_eq!(ranked(&scores), [3, 5, 1, 2, 0, 4]);
    }
}
