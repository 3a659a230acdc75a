/** Requests to the server that the page is from, with the user's API key. */

const KEY = "rayllm-api-key"; // in sessionStorage: one tab, gone with it
// Where the page is, so that it also works below a path of a reverse proxy; a name and password in the page's address,
// which fetch refuses, are left out.
const HERE = location.origin + location.pathname;

/** What went wrong, for people: `title` in two words, `message` in a sentence, `details` as the API has them. */
export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message);
    this.title = status ? `Error ${status}` : "Error";
    this.isKey = status === 401;
    const fields = ["type", "code", "param"].filter((name) => error[name]).map((name) => `${name}: ${error[name]}`);
    if (retryAfter) fields.push(`try again in ${retryAfter} s`);
    this.details = fields.join("  ");
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(key) { key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY); },
};

/** The response to a request. Throws ApiError for a status that is none of success, TypeError without a connection. */
export async function call(path, options = {}) {
  const key = apiKey.get();
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(new URL(path, HERE), { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let error = null;
  try { error = JSON.parse(text).error; } catch { /* not ours: a proxy's page, shown as it is */ }
  error = error?.message ? error : { message: text || response.statusText };
  throw new ApiError(response.status, error, response.headers.get("retry-after"));
}

/** The events of a stream. Throws ApiError for an event that is an error, and Error for a stream that breaks off. */
export async function* streamEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The answer broke off: the connection was closed before its end.");
      const frames = (rest + value).split(/\r?\n\r?\n/);
      rest = frames.pop();
      for (const frame of frames) {
        const lines = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5)).join("\n").trim();
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(0, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whatever ends the reading also ends the request
  }
}

export async function modelNames() {
  const { data } = await (await call("v1/models")).json();
  return data.map((model) => model.id);
}
