// Fetches the page anew and swaps what it shows, so that the reader keeps the place. Rests while unseen.
"use strict";
let failures = 0;
async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(8000) });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("main");
      if (answer.ok && fresh) {
        document.querySelector("main").replaceWith(fresh);
        document.title = page.title;
        failures = 0;
      } else {
        failures += 1;
      }
    } catch {
      failures += 1;
    }
    const gone = document.getElementById("gone");
    if (gone && failures > 1) gone.hidden = false;
  }
  setTimeout(refresh, Math.min(2000 * (1 + failures), 15000));
}
setTimeout(refresh, 2000);
