//! Dates for chat templates that print them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970 of 2024-07-26, the date that Llama 3's templates fall back to. Used for training data, which must
/// not depend on the day.
pub(super) const FIXED: u64 = 1_721_952_000;

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(FIXED, |elapsed| elapsed.as_secs())
}

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time (UTC) by the usual codes of `strftime`; others are an error that names the code.
pub(super) fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = zf_core::calendar::date(days);
    let name = MONTHS[month as usize - 1];
    let weekday = DAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut codes = format.chars();
    while let Some(c) = codes.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = codes.next();
        let bare = code == Some('-');
        if bare {
            code = codes.next();
        }
        let two = |value: u64| if bare { value.to_string() } else { format!("{value:02}") };
        match code {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&two(year % 100)),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(name),
            Some('b' | 'h') => out.push_str(&name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&two(time / 3600)),
            Some('M') => out.push_str(&two(time / 60 % 60)),
            Some('S') => out.push_str(&two(time % 60)),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{:02}:{:02}:{:02}", time / 3600, time / 60 % 60, time % 60)),
            Some('%') => out.push('%'),
            other => {
                let code = other.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now does not know `%{code}`"));
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_dates() {
        for (seconds, format, expected) in [
            (FIXED, "%d %b %Y", "26 Jul 2024"),
            (FIXED, "%A %B %-d %y %%", "Friday July 26 24 %"),
            (0, "%F %T %a", "1970-01-01 00:00:00 Thu"),
            (951_827_696, "%F %H:%M:%S", "2000-02-29 12:34:56"),
            (4_107_542_400, "%Y-%m-%e", "2100-03- 1"),
        ] {
            assert_eq!(strftime(seconds, format).unwrap(), expected);
        }
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
        assert!(strftime(0, "%").is_err());
    }
}
