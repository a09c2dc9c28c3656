// Runs a worker's script in a hidden frame where the page was opened as a file: browsers refuse
// workers there, and the search is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, document.baseURI);
          script.async = false;
          script.onload = resolve;
          script.onerror = reject;
          inside.document.body.appendChild(script);
        });
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      inside.postMessage = (data) =>
        setTimeout(() => {
          const event = new MessageEvent("message", { data: structuredClone(data) });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        });
      this.ready = load(url);
    }
    postMessage(data) {
      const copy = structuredClone(data);
      const inside = this.frame.contentWindow;
      this.ready.then(() =>
        setTimeout(() => inside.dispatchEvent(new MessageEvent("message", { data: copy }))),
      );
    }
    terminate() {
      this.frame.remove();
    }
  };
}
